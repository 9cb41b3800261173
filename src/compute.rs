//! What one rank computes with: its kernels and its threads.

use std::sync::Arc;

use fulmen_kernels::{Element, KernelSet, Kernels, Team};

/// Kernels and threads of one rank.
pub struct Compute {
    kernels: KernelSet,
    team: Team,
}

impl Compute {
    /// These kernels, with this team.
    pub fn new(kernels: KernelSet, team: Team) -> Self {
        Compute { kernels, team }
    }

    /// Kernels for one element type.
    pub fn kernels<T: Element>(&self) -> &Arc<dyn Kernels<T>> {
        self.kernels.of::<T>()
    }

    /// All four.
    pub fn kernel_set(&self) -> &KernelSet {
        &self.kernels
    }

    /// The threads.
    pub fn team(&self) -> &Team {
        &self.team
    }
}

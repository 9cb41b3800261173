//! The lines of `HPL.dat`, in order, and what their labels say.

/// What a line holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[allow(missing_docs, reason = "the variants are HPL.dat's own names")]
pub enum Field {
    Title,
    Output,
    Device,
    NCount,
    Ns,
    NbCount,
    Nbs,
    Pmap,
    GridCount,
    Ps,
    Qs,
    Threshold,
    PfactCount,
    Pfacts,
    NbminCount,
    Nbmins,
    NdivCount,
    Ndivs,
    RfactCount,
    Rfacts,
    BcastCount,
    Bcasts,
    DepthCount,
    Depths,
    Swap,
    SwapThreshold,
    L1,
    U,
    Equil,
    Align,
    Seed,
}

use Field::*;

/// netlib HPL 1.0a to 2.3: 31 lines.
pub const NETLIB: [Field; 31] = [
    Title,
    Title,
    Output,
    Device,
    NCount,
    Ns,
    NbCount,
    Nbs,
    Pmap,
    GridCount,
    Ps,
    Qs,
    Threshold,
    PfactCount,
    Pfacts,
    NbminCount,
    Nbmins,
    NdivCount,
    Ndivs,
    RfactCount,
    Rfacts,
    BcastCount,
    Bcasts,
    DepthCount,
    Depths,
    Swap,
    SwapThreshold,
    L1,
    U,
    Equil,
    Align,
];

/// HPL-GPU: no SWAP, threshold, L1, U and equilibration; the seed at the end. 27 lines.
pub fn hpl_gpu() -> Vec<Field> {
    NETLIB[..25].iter().copied().chain([Align, Seed]).collect()
}

/// HPL 1.0: no PMAP. 30 lines.
pub fn hpl_1_0() -> Vec<Field> {
    NETLIB.iter().copied().filter(|f| *f != Pmap).collect()
}

impl Field {
    /// The name in messages.
    pub fn name(self) -> &'static str {
        match self {
            Title => "title",
            Output => "output file",
            Device => "device out",
            NCount => "# of Ns",
            Ns => "N",
            NbCount => "# of NBs",
            Nbs => "NB",
            Pmap => "PMAP",
            GridCount => "# of grids",
            Ps => "P",
            Qs => "Q",
            Threshold => "threshold",
            PfactCount => "# of PFACTs",
            Pfacts => "PFACT",
            NbminCount => "# of NBMINs",
            Nbmins => "NBMIN",
            NdivCount => "# of NDIVs",
            Ndivs => "NDIV",
            RfactCount => "# of RFACTs",
            Rfacts => "RFACT",
            BcastCount => "# of BCASTs",
            Bcasts => "BCAST",
            DepthCount => "# of DEPTHs",
            Depths => "DEPTH",
            Swap => "SWAP",
            SwapThreshold => "swapping threshold",
            L1 => "L1",
            U => "U",
            Equil => "equilibration",
            Align => "alignment",
            Seed => "seed",
        }
    }

    /// The fields that a label may mean; empty when it says nothing that we know. Labels are free
    /// text, so only unmistakable words count.
    pub fn meant_by(label: &str) -> &'static [Field] {
        let label = label.to_lowercase();
        let has = |word: &str| label.contains(word);
        let first = label.split(|c: char| !c.is_alphanumeric()).find(|w| !w.is_empty()).unwrap_or("");
        if has("output file") {
            &[Output]
        } else if has("device out") {
            &[Device]
        } else if has("problem") && has("size") {
            &[NCount, Ns]
        } else if has("nbmin") || has("recursive stopping") {
            &[NbminCount, Nbmins]
        } else if has("of nbs") || first == "nbs" || has("block size") {
            &[NbCount, Nbs]
        } else if has("pmap") || has("process mapping") {
            &[Pmap]
        } else if has("process grids") || has("p x q)") {
            &[GridCount]
        } else if has("swapping threshold") {
            &[SwapThreshold]
        } else if first == "threshold" {
            &[Threshold]
        } else if has("recursive panel fact") || first.starts_with("rfact") {
            &[RfactCount, Rfacts]
        } else if has("panel fact") || first.starts_with("pfact") {
            &[PfactCount, Pfacts]
        } else if has("panels in recursion") || first.starts_with("ndiv") {
            &[NdivCount, Ndivs]
        } else if has("of broadcast") || first.starts_with("bcast") {
            &[BcastCount, Bcasts]
        } else if has("lookahead") || first.starts_with("depth") {
            &[DepthCount, Depths]
        } else if first == "swap" {
            &[Swap]
        } else if first == "l1" {
            &[L1]
        } else if first == "u" {
            &[U]
        } else if first.starts_with("equil") {
            &[Equil]
        } else if has("memory align") {
            &[Align]
        } else if first == "seed" {
            &[Seed]
        } else if first == "ns" || first == "n" {
            &[Ns]
        } else if first == "ps" || first == "p" {
            &[Ps]
        } else if first == "qs" || first == "q" {
            &[Qs]
        } else {
            &[]
        }
    }
}

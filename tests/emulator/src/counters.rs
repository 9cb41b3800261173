//! What tests ask for afterwards.

/// Everything counted, over all wires and processes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct Counters {
    /// Bytes that the "NIC" carried between two memories.
    pub bytes: u64,
    /// Messages that it carried.
    pub messages: u64,
    /// Send completions handed out.
    pub send_completions: u64,
    /// Receive completions handed out.
    pub recv_completions: u64,
    /// Messages that found no receive posted.
    pub recv_missing: u64,
    /// Messages whose receive spanned another number of frames, or was too short.
    pub length_errors: u64,
    /// Posts beyond the granted budget.
    pub over_posts: u64,
    /// Messages whose memory lay beyond a 4 GiB line within its region (Apple).
    pub aliased: u64,
    /// Work requests whose key or range was not that of a region.
    pub bad_keys: u64,
    /// RDMA writes refused for their remote key, range or right.
    pub bad_remote_keys: u64,
    /// Work requests that were not SENDs (Apple: carried as SENDs nevertheless).
    pub not_sends: u64,
    /// Completions lost because their queue was full.
    pub overruns: u64,
    /// Traps played.
    pub traps: u64,
    /// Queue pairs alive.
    pub qps: u64,
    /// Queue pairs ever made.
    pub qps_ever: u64,
    /// Most queue pairs alive at once on one device.
    pub qps_peak: u64,
    /// Completion queues alive.
    pub cqs: u64,
    /// Regions alive.
    pub mrs: u64,
    /// Regions ever made.
    pub mrs_ever: u64,
    /// Most regions alive at once on one device.
    pub mrs_peak: u64,
    /// Protection domains alive.
    pub pds: u64,
    /// Protection domains ever made.
    pub pds_ever: u64,
    /// Most protection domains alive at once on one device.
    pub pds_peak: u64,
    /// Protection domains lost by processes that died.
    pub pds_lost: u64,
}

impl Counters {
    /// Sums, but peaks are the largest.
    pub(crate) fn add(&mut self, other: &Counters) {
        let peaks = [
            self.qps_peak.max(other.qps_peak),
            self.mrs_peak.max(other.mrs_peak),
            self.pds_peak.max(other.pds_peak),
        ];
        let mine = bytemuck::cast_slice_mut::<Counters, u64>(std::slice::from_mut(self));
        let theirs = bytemuck::cast_slice::<Counters, u64>(std::slice::from_ref(other));
        for (a, b) in mine.iter_mut().zip(theirs) {
            *a += b;
        }
        [self.qps_peak, self.mrs_peak, self.pds_peak] = peaks;
    }
}

//! The calls of MPI that this fabric makes, with errors as values. Counts are 64-bit here; a message of more than
//! `i32::MAX` bytes travels as one element of a type made for it.

use std::ffi::{c_char, c_int, c_void};
use std::ptr;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use ::mpi::ffi;

use crate::error::{Error, Result};

/// Bytes as MPI knows them.
fn byte() -> ffi::MPI_Datatype {
    // SAFETY: a constant of the library.
    unsafe { ffi::RSMPI_UINT8_T }
}

/// What an error code means, in the library's own words.
fn words(code: c_int) -> String {
    let mut text = [0 as c_char; ffi::MPI_MAX_ERROR_STRING as usize + 1];
    let mut len = 0;
    // SAFETY: the buffer has room for the longest text and stays terminated.
    unsafe {
        ffi::MPI_Error_string(code, text.as_mut_ptr(), &mut len);
        std::ffi::CStr::from_ptr(text.as_ptr()).to_string_lossy().into_owned()
    }
}

fn check(what: &str, code: c_int) -> Result<()> {
    if code == ffi::MPI_SUCCESS as c_int {
        return Ok(());
    }
    Err(Error::System { what: what.into(), os: words(code) })
}

/// Whether MPI can be called: initialised, and not finalised.
pub fn is_up() -> bool {
    let (mut begun, mut ended) = (0, 0);
    // SAFETY: these two may be called at any time.
    unsafe {
        ffi::MPI_Initialized(&mut begun);
        ffi::MPI_Finalized(&mut ended);
    }
    begun != 0 && ended == 0
}

/// Whether other threads may exist, and this one may call MPI beside them.
pub fn may_have_threads() -> bool {
    let mut level = 0;
    // SAFETY: MPI is up (a communicator was at hand).
    unsafe {
        ffi::MPI_Query_thread(&mut level);
        level >= ffi::RSMPI_THREAD_FUNNELED
    }
}

/// Whether several threads may call MPI in turn.
pub fn is_serialized() -> bool {
    let mut level = 0;
    // SAFETY: as above.
    unsafe {
        ffi::MPI_Query_thread(&mut level);
        level >= ffi::RSMPI_THREAD_SERIALIZED
    }
}

/// Whether this is the thread that initialised MPI.
pub fn is_main_thread() -> bool {
    let mut yes = 0;
    // SAFETY: as above.
    unsafe { ffi::MPI_Is_thread_main(&mut yes) };
    yes != 0
}

/// Ends all of MPI's processes.
pub fn abort(code: u8) -> ! {
    // SAFETY: MPI is up. It does not return; were it to, this process ends all the same.
    unsafe { ffi::MPI_Abort(ffi::RSMPI_COMM_WORLD, c_int::from(code)) };
    std::process::exit(code.into())
}

/// `len` bytes as a count and a type. A type that was made is freed with this.
struct Shape {
    count: c_int,
    of: ffi::MPI_Datatype,
    made: bool,
}

impl Shape {
    const BLOCK: usize = 1 << 20;

    fn new(len: usize) -> Result<Self> {
        match c_int::try_from(len) {
            Ok(count) => Ok(Shape { count, of: byte(), made: false }),
            Err(_) => Shape::large(len),
        }
    }

    /// Blocks of 1 MiB, and what is left.
    fn large(len: usize) -> Result<Self> {
        let what = "a type for a long message";
        let blocks = c_int::try_from(len / Self::BLOCK)
            .map_err(|_| Error::System { what: what.into(), os: format!("{len} bytes are too many") })?;
        let rest = (len % Self::BLOCK) as c_int;
        // SAFETY: types are made, used to make another, and freed, as MPI allows: the last keeps what it is made of.
        unsafe {
            let mut block = byte();
            check(what, ffi::MPI_Type_contiguous(Self::BLOCK as c_int, byte(), &mut block))?;
            let lengths = [blocks, rest];
            let at = [0, (len - rest as usize) as ffi::MPI_Aint];
            let types = [block, byte()];
            let mut of = byte();
            let made = ffi::MPI_Type_create_struct(2, lengths.as_ptr(), at.as_ptr(), types.as_ptr(), &mut of);
            ffi::MPI_Type_free(&mut block);
            check(what, made)?;
            let shape = Shape { count: 1, of, made: true };
            check(what, ffi::MPI_Type_commit(&mut of))?;
            Ok(shape)
        }
    }
}

impl Drop for Shape {
    fn drop(&mut self) {
        if self.made {
            // SAFETY: made here and freed once; a transfer that uses it keeps it.
            unsafe { ffi::MPI_Type_free(&mut self.of) };
        }
    }
}

/// How far a request has come.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Progress {
    /// Not there yet.
    Pending,
    /// Done; a receive has got so many bytes.
    Done(usize),
    /// A receive met a message that is too long for it; so many bytes, if MPI tells.
    TooLong(usize),
}

/// A transfer under way. Its memory must stay until it is done: dropping it does not end it.
pub struct Request(ffi::MPI_Request);

// SAFETY: a handle; which thread may use it is MPI's rule, kept by the fabric.
unsafe impl Send for Request {}

impl Request {
    /// Asks once, and moves whatever MPI has under way. Not to be asked again when done.
    pub fn test(&mut self) -> Result<Progress> {
        let mut done = 0;
        // SAFETY: plain data, filled by the call.
        let mut status: ffi::MPI_Status = unsafe { std::mem::zeroed() };
        // SAFETY: a request made here that is not done yet.
        let code = unsafe { ffi::MPI_Test(&mut self.0, &mut done, &mut status) };
        let too_long = code != ffi::MPI_SUCCESS as c_int && {
            let mut class = 0;
            // SAFETY: any code may be asked about.
            unsafe { ffi::MPI_Error_class(code, &mut class) };
            class == ffi::MPI_ERR_TRUNCATE as c_int
        };
        if !too_long {
            check("MPI_Test", code)?;
            if done == 0 {
                return Ok(Progress::Pending);
            }
        }
        let mut bytes: ffi::MPI_Count = 0;
        // SAFETY: the status of a request that is done.
        unsafe { ffi::MPI_Get_elements_x(&status, byte(), &mut bytes) };
        let bytes = usize::try_from(bytes).unwrap_or_default();
        Ok(if too_long { Progress::TooLong(bytes) } else { Progress::Done(bytes) })
    }

    /// Takes back a receive; its memory is free when [`Request::test`] says that it is done.
    pub fn cancel(&mut self) {
        // SAFETY: a receive made here that is not done yet. What it says does not matter: the test follows.
        unsafe { ffi::MPI_Cancel(&mut self.0) };
    }
}

/// While it lives, an error of a request is returned, whatever the program wants of errors elsewhere. MPICH asks the
/// world what to do about a request that it has just completed, not the request's communicator.
pub struct Returned([(ffi::MPI_Comm, ffi::MPI_Errhandler); 2]);

impl Returned {
    /// `None` where it is not needed: a communicator's own handler is asked.
    pub fn errors() -> Option<Self> {
        static OPEN_MPI: OnceLock<bool> = OnceLock::new();
        let needed = !OPEN_MPI.get_or_init(|| library().starts_with("Open MPI"));
        // SAFETY: MPI is up, and both communicators are always there; the handlers found are put back and let go by drop.
        needed.then(|| unsafe {
            Returned([ffi::RSMPI_COMM_WORLD, ffi::RSMPI_COMM_SELF].map(|comm| {
                let mut before = ffi::RSMPI_ERRORS_RETURN;
                ffi::MPI_Comm_get_errhandler(comm, &mut before);
                ffi::MPI_Comm_set_errhandler(comm, ffi::RSMPI_ERRORS_RETURN);
                (comm, before)
            }))
        })
    }
}

impl Drop for Returned {
    fn drop(&mut self) {
        for (comm, before) in &mut self.0 {
            // SAFETY: a handler that MPI gave us for this communicator, let go once.
            unsafe {
                ffi::MPI_Comm_set_errhandler(*comm, *before);
                ffi::MPI_Errhandler_free(before);
            }
        }
    }
}

/// The library's name and version, in its own words.
fn library() -> String {
    let mut text = vec![0 as c_char; ffi::MPI_MAX_LIBRARY_VERSION_STRING as usize + 1];
    let mut len = 0;
    // SAFETY: the buffer has room for the longest text and stays terminated.
    unsafe {
        ffi::MPI_Get_library_version(text.as_mut_ptr(), &mut len);
        std::ffi::CStr::from_ptr(text.as_ptr()).to_string_lossy().into_owned()
    }
}

/// A communicator of our own, in which errors are returned.
pub struct Comm(ffi::MPI_Comm);

// SAFETY: a handle; which thread may use it is MPI's rule, kept by the fabric.
unsafe impl Send for Comm {}
// SAFETY: as above: the fabric's calls are made under one lock, by one thread.
unsafe impl Sync for Comm {}

impl Comm {
    /// A duplicate, so that nobody else's messages mix with ours. Collective.
    pub fn duplicate(of: ffi::MPI_Comm, deadline: Deadline) -> Result<Self> {
        // SAFETY: the caller's communicator is valid; the handle stays in its box until the request is done, and is used
        // only then.
        unsafe {
            let (mut comm, mut request) = (Box::new(ffi::RSMPI_COMM_NULL), ffi::RSMPI_REQUEST_NULL);
            check("MPI_Comm_idup", ffi::MPI_Comm_idup(of, &mut *comm, &mut request))?;
            let comm = *deadline.wait("MPI_Comm_idup", Request(request), comm)?;
            ffi::MPI_Comm_set_errhandler(comm, ffi::RSMPI_ERRORS_RETURN);
            Ok(Comm(comm))
        }
    }

    pub fn rank(&self) -> usize {
        let mut rank = 0;
        // SAFETY: our communicator.
        unsafe { ffi::MPI_Comm_rank(self.0, &mut rank) };
        rank as usize
    }

    pub fn size(&self) -> usize {
        let mut size = 0;
        // SAFETY: our communicator.
        unsafe { ffi::MPI_Comm_size(self.0, &mut size) };
        size as usize
    }

    /// Gives it back. Collective: every rank must be about to do it.
    pub fn free(&self) {
        let mut comm = self.0;
        // SAFETY: ours; the fabric makes no call with it afterwards.
        unsafe { ffi::MPI_Comm_free(&mut comm) };
    }

    /// Starts to send.
    ///
    /// # Safety
    /// `from` is `len` bytes that stay as they are until the request is done.
    pub unsafe fn isend(&self, from: *const u8, len: usize, to: usize, tag: i32) -> Result<Request> {
        let shape = Shape::new(len)?;
        // SAFETY: a request handle is plain data, filled by the call; the bytes are the caller's promise.
        unsafe {
            let mut request = ffi::RSMPI_REQUEST_NULL;
            let from = from.cast::<c_void>();
            let code = ffi::MPI_Isend(from, shape.count, shape.of, to as c_int, tag, self.0, &mut request);
            check("MPI_Isend", code).map(|()| Request(request))
        }
    }

    /// Starts to receive; `from` is a rank, or `None` for any.
    ///
    /// # Safety
    /// `into` is `len` bytes that nobody touches until the request is done.
    pub unsafe fn irecv(&self, into: *mut u8, len: usize, from: Option<usize>, tag: i32) -> Result<Request> {
        let shape = Shape::new(len)?;
        // SAFETY: as for `isend`.
        unsafe {
            let mut request = ffi::RSMPI_REQUEST_NULL;
            let from = from.map_or(ffi::RSMPI_ANY_SOURCE, |rank| rank as c_int);
            let code = ffi::MPI_Irecv(into.cast(), shape.count, shape.of, from, tag, self.0, &mut request);
            check("MPI_Irecv", code).map(|()| Request(request))
        }
    }

    /// Takes in and forgets one message, if it has come.
    pub fn discard(&self, from: usize, tag: i32) -> Result<bool> {
        // SAFETY: handles and statuses are plain data filled by the calls; the matched message is received once, into
        // memory of its size.
        unsafe {
            let (mut found, mut status): (c_int, ffi::MPI_Status) = (0, std::mem::zeroed());
            let mut message = ffi::RSMPI_MESSAGE_NULL;
            let code = ffi::MPI_Improbe(from as c_int, tag, self.0, &mut found, &mut message, &mut status);
            check("MPI_Improbe", code)?;
            if found == 0 {
                return Ok(false);
            }
            let mut bytes: ffi::MPI_Count = 0;
            ffi::MPI_Get_elements_x(&status, byte(), &mut bytes);
            let len = usize::try_from(bytes).unwrap_or_default();
            let mut scratch = vec![0u8; len];
            let shape = Shape::new(len)?;
            let into = scratch.as_mut_ptr().cast();
            let code = ffi::MPI_Mrecv(into, shape.count, shape.of, &mut message, ffi::RSMPI_STATUS_IGNORE);
            check("MPI_Mrecv", code).map(|()| true)
        }
    }

    /// Everyone's bytes, by rank. Collective.
    pub fn all_gather(&self, mine: &[u8], deadline: Deadline) -> Result<Vec<Vec<u8>>> {
        let lens = self.all_gather_words(mine.len() as u64, deadline)?;
        let longest = lens.iter().copied().max().unwrap_or_default() as usize;
        let mut padded = mine.to_vec();
        padded.resize(longest, 0);
        let mut all = vec![0u8; longest * self.size()];
        let count = Shape::new(longest)?;
        // SAFETY: both buffers have the sizes given, and stay until the request is done (`Deadline::wait` has them).
        let (_, all) = unsafe {
            let mut request = ffi::RSMPI_REQUEST_NULL;
            let (from, into) = (padded.as_ptr().cast(), all.as_mut_ptr().cast());
            let code = ffi::MPI_Iallgather(
                from,
                count.count,
                count.of,
                into,
                count.count,
                count.of,
                self.0,
                &mut request,
            );
            check("MPI_Iallgather", code)?;
            deadline.wait("MPI_Iallgather", Request(request), (padded, all))?
        };
        let pieces = all.chunks(longest.max(1)).zip(lens);
        Ok(pieces.map(|(piece, len)| piece[..len as usize].to_vec()).collect())
    }

    /// Everyone's word, by rank. Collective.
    pub fn all_gather_words(&self, mine: u64, deadline: Deadline) -> Result<Vec<u64>> {
        let (mine, mut all) = (Box::new(mine), vec![0u64; self.size()]);
        // SAFETY: as in `all_gather`.
        let (_, all) = unsafe {
            let of = ffi::RSMPI_UINT64_T;
            let mut request = ffi::RSMPI_REQUEST_NULL;
            let (from, into) = (ptr::from_ref(&*mine).cast(), all.as_mut_ptr().cast());
            check("MPI_Iallgather", ffi::MPI_Iallgather(from, 1, of, into, 1, of, self.0, &mut request))?;
            deadline.wait("MPI_Iallgather", Request(request), (mine, all))?
        };
        Ok(all)
    }

    /// How many of the ranks share memory with this one. Collective.
    pub fn ranks_here(&self) -> Result<usize> {
        // SAFETY: handles are plain data, filled by the calls; the new communicator is freed at once.
        unsafe {
            let mut here = ffi::RSMPI_COMM_NULL;
            let kind = ffi::RSMPI_COMM_TYPE_SHARED;
            let code = ffi::MPI_Comm_split_type(self.0, kind, 0, ffi::RSMPI_INFO_NULL, &mut here);
            check("MPI_Comm_split_type", code)?;
            let here = Comm(here);
            let size = here.size();
            here.free();
            Ok(size)
        }
    }

    /// Starts to tell all that this rank has come here.
    pub fn ibarrier(&self) -> Result<Request> {
        // SAFETY: a request handle is plain data, filled by the call.
        unsafe {
            let mut request = ffi::RSMPI_REQUEST_NULL;
            check("MPI_Ibarrier", ffi::MPI_Ibarrier(self.0, &mut request)).map(|()| Request(request))
        }
    }
}

/// Until when all ranks must have come to a collective call.
#[derive(Clone, Copy)]
pub struct Deadline {
    began: Instant,
    bound: Duration,
}

impl Deadline {
    pub fn within(bound: Duration) -> Self {
        Deadline { began: Instant::now(), bound }
    }

    /// Waits for a request of a collective call, and gives `buffers` back. When that fails, MPI may still use them: then they
    /// are never freed.
    pub fn wait<B>(&self, what: &str, mut request: Request, buffers: B) -> Result<B> {
        let error = loop {
            match request.test() {
                Ok(Progress::Pending) if self.began.elapsed() <= self.bound => std::thread::yield_now(),
                Ok(Progress::Pending) => {
                    let os = format!("not all ranks came to it within {:.0} s", self.bound.as_secs_f64());
                    break Error::System { what: what.into(), os };
                }
                Ok(_) => return Ok(buffers),
                Err(e) => break e,
            }
        };
        std::mem::forget(buffers);
        Err(error)
    }
}

/// One-sided access to a piece of every rank's memory.
pub struct Window {
    raw: ffi::MPI_Win,
    base: *mut u8,
}

// SAFETY: a handle and memory that MPI owns; who uses it when is the fabric's business.
unsafe impl Send for Window {}
// SAFETY: as above.
unsafe impl Sync for Window {}

impl Window {
    /// A page.
    const ALIGNED: usize = 4096;

    /// `len` bytes of this rank, from [`Window::start`] on. Collective; the ranks may differ in `len`.
    pub fn allocate(comm: &Comm, len: usize) -> Result<Self> {
        // SAFETY: handles and the base are plain data, filled by the call.
        unsafe {
            let mut base: *mut u8 = ptr::null_mut();
            let mut raw = ffi::RSMPI_WIN_NULL;
            let into = (&raw mut base).cast();
            let bytes = (len + Self::ALIGNED) as ffi::MPI_Aint;
            let code = ffi::MPI_Win_allocate(bytes, 1, ffi::RSMPI_INFO_NULL, comm.0, into, &mut raw);
            check("MPI_Win_allocate", code)?;
            ffi::MPI_Win_set_errhandler(raw, ffi::RSMPI_ERRORS_RETURN);
            check("MPI_Win_lock_all", ffi::MPI_Win_lock_all(ffi::MPI_MODE_NOCHECK as c_int, raw))?;
            Ok(Window { raw, base })
        }
    }

    /// The first byte that may be used: page-aligned.
    pub fn start(&self) -> *mut u8 {
        let skip = (self.base as usize).next_multiple_of(Self::ALIGNED) - self.base as usize;
        // SAFETY: so much more was allocated.
        unsafe { self.base.add(skip) }
    }

    /// The offset that other ranks know an address of this window by.
    pub fn offset(&self, address: *const u8) -> u64 {
        address as u64 - self.base as u64
    }

    /// Writes to another rank's memory, at an offset; returns when it is there.
    ///
    /// # Safety
    /// `from` is `len` bytes that nobody writes meanwhile.
    pub unsafe fn put(&self, from: *const u8, len: usize, to: usize, at: u64) -> Result<()> {
        let shape = Shape::new(len)?;
        // SAFETY: the bytes are the caller's promise; MPI checks the target's offset.
        unsafe {
            let at = at as ffi::MPI_Aint;
            let (from, to) = (from.cast(), to as c_int);
            let code = ffi::MPI_Put(from, shape.count, shape.of, to, at, shape.count, shape.of, self.raw);
            check("MPI_Put", code)?;
            check("MPI_Win_flush", ffi::MPI_Win_flush(to, self.raw))
        }
    }

    /// Makes what others have put visible to this thread.
    pub fn sync(&self) {
        // SAFETY: our window, in a passive epoch.
        unsafe { ffi::MPI_Win_sync(self.raw) };
    }

    /// Ends access to it.
    pub fn close(&self) {
        // SAFETY: ours; no call but `free` is made with it afterwards.
        unsafe { ffi::MPI_Win_unlock_all(self.raw) };
    }

    /// Gives its memory back. Collective, after [`Window::close`], and only when nobody uses its memory any more.
    pub fn free(&self) {
        let mut raw = self.raw;
        // SAFETY: ours; nothing is done with it afterwards.
        unsafe { ffi::MPI_Win_free(&mut raw) };
    }
}

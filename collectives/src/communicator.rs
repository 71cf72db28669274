//! Collective operations (all-reduce, all-gather, reduce-scatter, all-to-all) between GPUs through one RCCL
//! or NCCL communicator, in stream order.
//!
//! The communicator is non-blocking: its creation and all library calls return before they complete. Callers
//! poll for completion and may abort the communicator.

use std::ffi::{CStr, c_int};
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread;
use std::time::{Duration, Instant};

use device::gpu::{GpuError, memory};
use device::{Buffer, DType, DeviceError, DeviceStream, MatMut, MatRef};
use hip_runtime_sys::DriverPtr;
use kernels::RowGather;
use kernels::gpu::GpuBackend;
use rccl_sys::{
    NcclConfig, NcclDataType, NcclResult, NcclUniqueId, REDUCE_SUM, RcclLibrary, VERSION_MIN,
    status,
};

/// Interval at which the completion of a library call is polled.
const POLL_INTERVAL: Duration = Duration::from_micros(20);
/// Time for which the host polls for the completion of a library call without sleeping. The library launches
/// most calls within this time, and a sleep would take about 70 µs.
const SPIN_TIME: Duration = Duration::from_micros(300);
/// Maximum time that an abort waits for a library call of another thread to return. The library call returns
/// soon unless the device accepts no more work.
const ABORT_WAIT: Duration = Duration::from_secs(1);
/// Number of i32 row indices 0, 1, 2, … that are uploaded when the communicator is created. The gather kernel
/// of `all_gather` uses them to copy the columns of each rank from scratch memory to the output.
const INITIAL_INDICES: usize = 1024;

/// Collective library (RCCL or NCCL) for one device.
#[derive(Debug, Clone)]
pub struct CollectiveLibrary {
    device: Arc<GpuBackend>,
    rccl: Arc<RcclLibrary>,
}

/// Unique id of a communicator. Rank 0 creates the id, and every rank passes it to join the communicator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CommunicatorId(NcclUniqueId);

/// RCCL or NCCL communicator of one rank. Dropping this value aborts the communicator without waiting for
/// other ranks.
pub struct GpuCommunicator {
    device: Arc<GpuBackend>,
    rccl: Arc<RcclLibrary>,
    size: usize,
    rank: usize,
    /// Handle of the NCCL or RCCL communicator; null after the communicator was aborted.
    handle: AtomicPtr<std::ffi::c_void>,
    /// Lock that a thread holds during each NCCL or RCCL call for this communicator.
    call_lock: Mutex<()>,
    /// Device buffers with the row indices 0, 1, 2, …, for the gather kernel of `all_gather`. Existing
    /// buffers are never freed or replaced, because captured graphs contain their addresses.
    index_buffers: Mutex<Vec<Buffer>>,
}

impl CommunicatorId {
    /// Number of 32-bit words of a communicator id.
    pub const WORDS: usize = 32;

    /// Encodes the communicator id as 32-bit words, which are sent to other ranks.
    #[must_use]
    pub fn to_words(self) -> [i32; Self::WORDS] {
        let mut words = [0; Self::WORDS];
        for (word, bytes) in words.iter_mut().zip(self.0.0.chunks_exact(4)) {
            *word = i32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        }
        words
    }

    /// Decodes a communicator id that was received from another rank.
    #[must_use]
    pub fn from_words(words: &[i32; Self::WORDS]) -> Self {
        let mut bytes = [0; 4 * Self::WORDS];
        for (bytes, word) in bytes.chunks_exact_mut(4).zip(words) {
            bytes.copy_from_slice(&word.to_le_bytes());
        }
        Self(NcclUniqueId(bytes))
    }
}

impl CollectiveLibrary {
    /// Opens RCCL or NCCL for the device.
    ///
    /// Errors: no library was found, or its version is too old.
    pub fn open(device: &Arc<GpuBackend>) -> Result<Self, DeviceError> {
        let Some(search) = device.collectives() else {
            return Err(GpuError::NoCollectiveLibrary.into());
        };
        let rccl = RcclLibrary::open(search).map_err(GpuError::from)?;
        let mut version = 0;
        // SAFETY: `version` is valid for writes.
        check(&rccl, unsafe { (rccl.get_version)(&raw mut version) }, "version", None)?;
        if version < VERSION_MIN {
            let library = rccl.library.display().to_string();
            return Err(GpuError::OutdatedCollectiveLibrary {
                library,
                version,
                oldest: VERSION_MIN,
            }
            .into());
        }
        Ok(Self { device: Arc::clone(device), rccl: Arc::new(rccl) })
    }

    /// Creates the unique id of a new communicator.
    pub fn new_id(&self) -> Result<CommunicatorId, DeviceError> {
        self.device.runtime().enter()?;
        let mut id = NcclUniqueId([0; 128]);
        // SAFETY: `id` is valid for writes.
        check(&self.rccl, unsafe { (self.rccl.get_unique_id)(&raw mut id) }, "id", None)?;
        Ok(CommunicatorId(id))
    }

    /// Starts to join the communicator `id` of `size` ranks as rank `rank`. [`GpuCommunicator::is_ready`]
    /// returns true after all ranks have joined.
    pub fn begin(
        &self,
        id: &CommunicatorId,
        size: usize,
        rank: usize,
    ) -> Result<GpuCommunicator, DeviceError> {
        let runtime = self.device.runtime();
        runtime.not_capturing("creation of a communicator")?;
        runtime.enter()?;
        let (mut handle, config) = (std::ptr::null_mut(), NcclConfig::non_blocking());
        let init = self.rccl.comm_init_rank_config;
        // SAFETY: `handle` is valid for writes, the library copies `config`, and the device is current.
        let code =
            unsafe { init(&raw mut handle, size as c_int, id.0, rank as c_int, &raw const config) };
        if code != status::IN_PROGRESS {
            check(&self.rccl, code, "join", None)?;
        }
        let communicator = GpuCommunicator {
            device: Arc::clone(&self.device),
            rccl: Arc::clone(&self.rccl),
            size,
            rank,
            handle: AtomicPtr::new(handle),
            call_lock: Mutex::default(),
            index_buffers: Mutex::default(),
        };
        communicator.index_buffer(INITIAL_INDICES)?;
        Ok(communicator)
    }
}

impl GpuCommunicator {
    /// Number of ranks of the communicator.
    #[must_use]
    pub fn size(&self) -> usize {
        self.size
    }

    /// Index of this rank in the communicator.
    #[must_use]
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Whether the device is in a dry run, in which launches do not execute anything.
    #[must_use]
    pub fn is_dry_run(&self) -> bool {
        self.device.runtime().is_dry_run()
    }

    /// Whether launches on the device are being captured into a graph.
    #[must_use]
    pub fn is_capturing(&self) -> bool {
        self.device.runtime().is_capturing()
    }

    /// Whether all pending library calls have completed. The function never blocks, even while another thread
    /// is in a library call; it may be called from any thread.
    ///
    /// Errors: the communicator has failed, on this rank or on another rank.
    pub fn is_ready(&self) -> Result<bool, DeviceError> {
        let _lock = match self.call_lock.try_lock() {
            Ok(guard) => guard,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return Ok(false),
        };
        Ok(self.poll("communicator")?)
    }

    /// Aborts operations in flight, including operations on the device, and frees the communicator. Later
    /// calls fail. May be called from any thread.
    pub fn abort(&self) {
        let started = Instant::now();
        let guard = loop {
            match self.call_lock.try_lock() {
                Ok(guard) => break Some(guard),
                Err(TryLockError::Poisoned(poisoned)) => break Some(poisoned.into_inner()),
                // A library call may be blocked because the device waits for a failed rank. Only the abort
                // ends such a call, so the abort must not wait any longer for the call to return.
                Err(TryLockError::WouldBlock) if started.elapsed() > ABORT_WAIT => break None,
                Err(TryLockError::WouldBlock) => thread::sleep(POLL_INTERVAL),
            }
        };
        let handle = self.handle.swap(std::ptr::null_mut(), Ordering::SeqCst);
        // `comm_abort` may block until captured graphs that use the communicator are destroyed. The lock is
        // released here, because the thread that owns these graphs may need the lock first.
        drop(guard);
        if !handle.is_null() && self.device.runtime().enter().is_ok() {
            // SAFETY: the handle was created by this library and was just replaced by null, so it is freed
            // once. The only thread that may still use it has been inside the library for longer than
            // `ABORT_WAIT`, and only the abort ends its call.
            unsafe { (self.rccl.comm_abort)(handle) };
        }
    }

    /// All-reduce: computes `x = Σ x` over all ranks.
    pub fn all_reduce(&self, s: &DeviceStream, mut x: MatMut<'_>) -> Result<(), DeviceError> {
        const NAME: &str = "all_reduce";
        check_contiguous(NAME, x.as_ref())?;
        let (count, kind) = (x.rows() * x.cols(), reduction_type(NAME, x.dtype())?);
        let at = x.as_mut_ptr().cast();
        self.enqueue(NAME, s, |comm, stream| {
            // SAFETY: `at` points to `count` contiguous elements that only this call uses.
            unsafe { (self.rccl.all_reduce)(at, at, count, kind, REDUCE_SUM, comm, stream) }
        })
    }

    /// Gathers the columns of `own` of all ranks into `all`, in rank order. If `all` has fewer columns than
    /// all ranks together, the last columns are dropped.
    pub fn all_gather(
        &self,
        s: &DeviceStream,
        own: MatRef<'_>,
        mut all: MatMut<'_>,
    ) -> Result<(), DeviceError> {
        const NAME: &str = "all_gather";
        check_contiguous(NAME, own)?;
        let (rows, cols, dtype) = (own.rows(), own.cols(), own.dtype());
        let (count, kind) = (rows * cols, data_type(NAME, dtype)?);
        // A single row is gathered directly into `all`. Several rows are gathered into scratch memory; the
        // columns of each rank are then copied to `all`.
        let is_direct = rows == 1 && all.cols() == self.size * cols;
        let stacked = if is_direct {
            all.as_mut_ptr()
        } else {
            self.device.scratch(s, self.size * count * dtype.bytes())?
        };
        self.enqueue(NAME, s, |comm, stream| {
            let from = own.as_ptr().cast_mut().cast();
            // SAFETY: `from` has `count` elements, and `stacked` has room for `count` elements per rank.
            unsafe { (self.rccl.all_gather)(from, stacked.cast(), count, kind, comm, stream) }
        })?;
        if is_direct {
            return Ok(());
        }
        let row_indices = self.index_buffer(rows)?;
        for rank in 0..self.size {
            let first = (rank * cols).min(all.cols());
            let width = cols.min(all.cols() - first);
            if width == 0 || rows == 0 {
                continue;
            }
            let stride = all.stride();
            // SAFETY: `stacked` has `rows` rows of `cols` columns per rank; the row indices are written once,
            // before this launch; the columns are inside `all`.
            let (from, to, row_indices) = unsafe {
                (
                    MatRef::from_raw(
                        stacked.add(rank * count * dtype.bytes()),
                        dtype,
                        rows,
                        width,
                        cols,
                    ),
                    MatMut::from_raw(
                        all.as_mut_ptr().add(first * dtype.bytes()),
                        dtype,
                        rows,
                        width,
                        stride,
                    ),
                    MatRef::from_raw(row_indices, DType::I32, 1, rows, rows),
                )
            };
            self.device.launch(s, RowGather { y: to, x: from, rows: row_indices })?;
        }
        Ok(())
    }

    /// Gathers the rows of `own` of all ranks into `all`, in rank order. `all` is divided into equal parts,
    /// one for each rank. In the part of a rank, the rows after the rows of `own` are filled with 0, or with
    /// -1 for integer types.
    pub fn all_gather_rows(
        &self,
        s: &DeviceStream,
        own: MatRef<'_>,
        mut all: MatMut<'_>,
    ) -> Result<(), DeviceError> {
        const NAME: &str = "all_gather_rows";
        check_contiguous(NAME, own)?;
        check_contiguous(NAME, all.as_ref())?;
        let (dtype, max_rows) = (own.dtype(), all.rows() / self.size);
        let row_bytes = own.cols() * dtype.bytes();
        let (count, kind) = (max_rows * own.cols(), data_type(NAME, dtype)?);
        let to = all.as_mut_ptr();
        // SAFETY: `all` contains the rows of this rank.
        let own_rows = unsafe { to.add(self.rank * max_rows * row_bytes) };
        let padding_byte = if matches!(dtype, DType::I32 | DType::I64) { 0xff } else { 0 };
        let (own_bytes, padding_bytes) =
            (own.rows() * row_bytes, (max_rows - own.rows()) * row_bytes);
        self.copy(s, own_rows, own.as_ptr(), own_bytes)?;
        // SAFETY: `all` contains the padding rows of this rank.
        self.fill(s, unsafe { own_rows.add(own_bytes) }, padding_byte, padding_bytes)?;
        self.enqueue(NAME, s, |comm, stream| {
            // SAFETY: the input is at `rank · count` of the output, as the library requires for an in-place
            // all-gather.
            unsafe { (self.rccl.all_gather)(own_rows.cast(), to.cast(), count, kind, comm, stream) }
        })
    }

    /// Computes `Σ x` over all ranks. The rows of `x` are divided equally among the ranks. Of this rank's
    /// part of the sum, the first `own.rows()` rows are written to `own`.
    pub fn reduce_scatter(
        &self,
        s: &DeviceStream,
        x: MatRef<'_>,
        mut own: MatMut<'_>,
    ) -> Result<(), DeviceError> {
        const NAME: &str = "reduce_scatter";
        check_contiguous(NAME, x)?;
        check_contiguous(NAME, own.as_ref())?;
        let row_bytes = x.cols() * x.dtype().bytes();
        let max_rows = x.rows() / self.size;
        let (count, kind) = (max_rows * x.cols(), reduction_type(NAME, x.dtype())?);
        let is_full = own.rows() == max_rows;
        let to = if is_full {
            own.as_mut_ptr()
        } else {
            self.device.scratch(s, max_rows * row_bytes)?
        };
        self.enqueue(NAME, s, |comm, stream| {
            let from = x.as_ptr().cast_mut().cast();
            // SAFETY: `from` has `count` elements per rank, and `to` has room for `count` elements.
            unsafe {
                (self.rccl.reduce_scatter)(from, to.cast(), count, kind, REDUCE_SUM, comm, stream)
            }
        })?;
        let copy_bytes = if is_full { 0 } else { own.rows() * row_bytes };
        self.copy(s, own.as_mut_ptr(), to, copy_bytes)
    }

    /// Sends the first `send_rows[0]` rows of `x` to rank 0, the next `send_rows[1]` rows to rank 1, and so
    /// on. `y` receives `receive_rows[r]` rows from each rank `r`, in rank order. The counts must be
    /// consistent on all ranks.
    pub fn all_to_all(
        &self,
        s: &DeviceStream,
        x: MatRef<'_>,
        send_rows: &[usize],
        mut y: MatMut<'_>,
        receive_rows: &[usize],
    ) -> Result<(), DeviceError> {
        const NAME: &str = "all_to_all";
        check_contiguous(NAME, x)?;
        check_contiguous(NAME, y.as_ref())?;
        let (cols, kind) = (x.cols(), data_type(NAME, x.dtype())?);
        let row_bytes = cols * x.dtype().bytes();
        let rows: [usize; 2] = [send_rows.iter().sum(), receive_rows.iter().sum()];
        if rows[0] > x.rows() || rows[1] > y.rows() {
            let (got, expected) = (rows[0].max(rows[1]), x.rows().min(y.rows()));
            return Err(DeviceError::Shape { kernel: NAME, what: "rows", got, expected });
        }
        let (mut source, mut target) = (x.as_ptr(), y.as_mut_ptr());
        self.enqueue(NAME, s, |comm, stream| {
            // SAFETY: the row ranges are inside both matrices, as checked above; the group call starts and
            // ends on this thread.
            unsafe {
                let mut code = (self.rccl.group_start)();
                for rank in 0..self.size {
                    let (sent, received) = (send_rows[rank], receive_rows[rank]);
                    let peer = rank as c_int;
                    if code == status::SUCCESS && sent > 0 {
                        let (from, count) = (source.cast_mut().cast(), sent * cols);
                        code = pending((self.rccl.send)(from, count, kind, peer, comm, stream));
                    }
                    if code == status::SUCCESS && received > 0 {
                        let (to, count) = (target.cast(), received * cols);
                        code = pending((self.rccl.recv)(to, count, kind, peer, comm, stream));
                    }
                    source = source.add(sent * row_bytes);
                    target = target.add(received * row_bytes);
                }
                let end_code = (self.rccl.group_end)();
                if code == status::SUCCESS { end_code } else { code }
            }
        })
    }

    /// Copies the matrix `x` of rank `from` to the matrix `x` of every other rank.
    pub fn broadcast(
        &self,
        s: &DeviceStream,
        mut x: MatMut<'_>,
        from: usize,
    ) -> Result<(), DeviceError> {
        const NAME: &str = "broadcast";
        check_contiguous(NAME, x.as_ref())?;
        let (count, kind) = (x.rows() * x.cols(), data_type(NAME, x.dtype())?);
        let at = x.as_mut_ptr().cast();
        self.enqueue(NAME, s, |comm, stream| {
            // SAFETY: `at` points to `count` contiguous elements that only this call uses.
            unsafe { (self.rccl.broadcast)(at, at, count, kind, from as c_int, comm, stream) }
        })
    }

    /// Blocks the host until all launches on stream `s` have completed.
    pub fn synchronize(&self, s: &DeviceStream) -> Result<(), DeviceError> {
        Ok(self.device.runtime().synchronize(s)?)
    }

    /// Enqueues a library call on stream `s`, and blocks the host until the library has launched it.
    fn enqueue(
        &self,
        name: &'static str,
        s: &DeviceStream,
        call: impl FnOnce(DriverPtr, DriverPtr) -> NcclResult,
    ) -> Result<(), DeviceError> {
        let runtime = self.device.runtime();
        if runtime.is_dry_run() {
            return Ok(());
        }
        let stream = runtime.stream(s)?;
        runtime.enter()?;
        {
            let _lock = self.lock_calls();
            let code = call(self.live_handle()?, stream);
            if code != status::IN_PROGRESS {
                check(&self.rccl, code, name, Some(self.live_handle()?))?;
            }
        }
        self.wait_until_launched(name)?;
        runtime.launched(s, name)
    }

    /// Blocks the host until NCCL or RCCL has launched the pending call `name`.
    fn wait_until_launched(&self, name: &'static str) -> Result<(), GpuError> {
        let started = Instant::now();
        while !{
            let _lock = self.lock_calls();
            self.poll(name)?
        } {
            if started.elapsed() < SPIN_TIME {
                thread::yield_now();
            } else {
                thread::sleep(POLL_INTERVAL);
            }
        }
        Ok(())
    }

    fn poll(&self, call: &'static str) -> Result<bool, GpuError> {
        let (handle, mut code) = (self.live_handle()?, status::SUCCESS);
        // SAFETY: callers have locked `call_lock`. `abort` frees the communicator only with this lock, or
        // after another call has had it for longer than `ABORT_WAIT`; `code` is valid for writes.
        let result = unsafe { (self.rccl.comm_get_async_error)(handle, &raw mut code) };
        check(&self.rccl, result, call, None)?;
        match code {
            status::IN_PROGRESS => Ok(false),
            code => check(&self.rccl, code, call, Some(handle)).map(|()| true),
        }
    }

    fn lock_calls(&self) -> MutexGuard<'_, ()> {
        self.call_lock.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn live_handle(&self) -> Result<DriverPtr, GpuError> {
        let handle = self.handle.load(Ordering::SeqCst);
        if handle.is_null() { Err(GpuError::CommunicatorAborted) } else { Ok(handle) }
    }

    /// Returns the device address of a buffer with at least `count` i32 row indices 0, 1, 2, …, for the
    /// gather kernel.
    fn index_buffer(&self, count: usize) -> Result<*const u8, DeviceError> {
        let mut buffers = self.index_buffers.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(buffer) = buffers.iter().find(|buffer| buffer.bytes() >= count * 4) {
            return Ok(buffer.as_ptr());
        }
        let count = count.next_power_of_two();
        let mut buffer = memory::alloc(self.device.runtime(), count * 4)?;
        let bytes: Vec<u8> = (0..count as i32).flat_map(i32::to_le_bytes).collect();
        self.device.copy_in(&mut buffer, 0, &bytes)?;
        let address = buffer.as_ptr();
        buffers.push(buffer);
        Ok(address)
    }

    /// Copies device memory asynchronously on stream `s`.
    fn copy(
        &self,
        s: &DeviceStream,
        to: *mut u8,
        from: *const u8,
        bytes: usize,
    ) -> Result<(), DeviceError> {
        let runtime = self.device.runtime();
        if bytes == 0 || runtime.is_dry_run() {
            return Ok(());
        }
        runtime.enter()?;
        let copy = runtime.driver.copy_on_device;
        // SAFETY: callers pass ranges of borrowed matrices, or of scratch memory of sufficient size.
        let code = unsafe { copy(to.cast(), from.cast_mut().cast(), bytes, runtime.stream(s)?) };
        runtime.check(code, "copy on device")?;
        runtime.launched(s, "copy")
    }

    /// Sets every byte of a range of device memory to the value `byte`, asynchronously on stream `s`.
    fn fill(
        &self,
        s: &DeviceStream,
        to: *mut u8,
        byte: u8,
        bytes: usize,
    ) -> Result<(), DeviceError> {
        let runtime = self.device.runtime();
        if bytes == 0 || runtime.is_dry_run() {
            return Ok(());
        }
        runtime.enter()?;
        // SAFETY: callers pass ranges of borrowed matrices.
        let code = unsafe { (runtime.driver.fill)(to.cast(), byte, bytes, runtime.stream(s)?) };
        runtime.check(code, "fill")?;
        runtime.launched(s, "fill")
    }
}

impl Drop for GpuCommunicator {
    fn drop(&mut self) {
        // The communicator is aborted, not finalised: `comm_finalize` would wait for other ranks, which may
        // have exited.
        self.abort();
    }
}

impl std::fmt::Debug for GpuCommunicator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "GpuCommunicator({} of {})", self.rank, self.size)
    }
}

/// Result code of a library call inside a group call, where the code `IN_PROGRESS` counts as success.
fn pending(code: NcclResult) -> NcclResult {
    if code == status::IN_PROGRESS { status::SUCCESS } else { code }
}

fn check(
    rccl: &RcclLibrary,
    code: NcclResult,
    call: &'static str,
    handle: Option<DriverPtr>,
) -> Result<(), GpuError> {
    if code == status::SUCCESS {
        return Ok(());
    }
    let text = |at: *const std::ffi::c_char| {
        // SAFETY: `at` is null, or points to a text of the library that is valid until its next error.
        (!at.is_null()).then(|| unsafe { CStr::from_ptr(at) }.to_string_lossy().into_owned())
    };
    // SAFETY: the function accepts any code.
    let name = text(unsafe { (rccl.get_error_string)(code) }).unwrap_or_default();
    // SAFETY: the argument is null, or a communicator that is not freed during this call: see `poll`.
    let last = text(unsafe { (rccl.get_last_error)(handle.unwrap_or(std::ptr::null_mut())) });
    let what = [Some(name), last].into_iter().flatten().filter(|text| !text.is_empty());
    let what = what.collect::<Vec<_>>().join(": ");
    Err(GpuError::Collective { call, status: code, what })
}

/// Rejects a matrix whose rows are not contiguous.
fn check_contiguous(kernel: &'static str, x: MatRef<'_>) -> Result<(), DeviceError> {
    if x.rows() <= 1 || x.stride() == x.cols() {
        return Ok(());
    }
    let (what, got, expected) = ("row stride", x.stride(), x.cols());
    Err(DeviceError::Shape { kernel, what, got, expected })
}

fn data_type(kernel: &'static str, dtype: DType) -> Result<c_int, DeviceError> {
    let kind = match dtype {
        DType::F32 => NcclDataType::F32,
        DType::BF16 => NcclDataType::BF16,
        DType::F16 => NcclDataType::F16,
        DType::I32 => NcclDataType::I32,
        DType::I64 => NcclDataType::I64,
        dtype @ DType::F8E4M3 => {
            return Err(DeviceError::Unsupported { kernel, what: "elements", dtype });
        }
    };
    Ok(kind as c_int)
}

fn reduction_type(kernel: &'static str, dtype: DType) -> Result<c_int, DeviceError> {
    match dtype {
        DType::F32 | DType::BF16 | DType::F16 => data_type(kernel, dtype),
        dtype => Err(DeviceError::Unsupported { kernel, what: "elements of a sum", dtype }),
    }
}

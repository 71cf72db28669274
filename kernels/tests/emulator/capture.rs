//! Graph capture, instantiation and replay: permitted calls, rejected calls, and the arguments that a graph
//! copies.

use crate::deadlines::BoundedJoin as _;
use hip_runtime_sys::{DriverPtr, DriverStatus, code};

use crate::child_process;
use crate::gpu::{EmulatedGpu, EmulatedMemory, KernelArg, LaunchShape};
use crate::injected_bugs::ROWS;

const INVALIDATED: DriverStatus = 901;
const NOT_CAPTURING: DriverStatus = 903;
const UNJOINED_STREAM: DriverStatus = 904;

impl EmulatedGpu {
    fn begin_capture(&self, mode: i32) {
        // SAFETY: `self.stream` exists until the process ends.
        assert_eq!(unsafe { (self.driver.capture_begin)(self.stream, mode) }, code::SUCCESS);
    }

    fn end_capture(&self) -> Result<DriverPtr, DriverStatus> {
        let mut graph = std::ptr::null_mut();
        // SAFETY: `self.stream` exists until the process ends, and `graph` is writable.
        match unsafe { (self.driver.capture_end)(self.stream, &raw mut graph) } {
            code::SUCCESS => Ok(graph),
            code => Err(code),
        }
    }

    fn instantiate(&self, graph: DriverPtr) -> DriverPtr {
        let mut executable = std::ptr::null_mut();
        // SAFETY: `graph` was captured, and it is destroyed only after it was instantiated.
        unsafe {
            let make = self.driver.graph_instantiate;
            assert_eq!(make(&raw mut executable, graph, 0), code::SUCCESS);
            assert_eq!((self.driver.graph_destroy)(graph), code::SUCCESS);
        }
        executable
    }

    fn replay(&self, executable: DriverPtr) {
        // SAFETY: `executable` was instantiated before, and the memory that it accesses is not freed yet.
        assert_eq!(unsafe { (self.driver.graph_launch)(executable, self.stream) }, code::SUCCESS);
    }

    fn copy(&self, to: EmulatedMemory, from: EmulatedMemory) {
        let copy = self.driver.copy_on_device;
        // SAFETY: both allocations have at least `from.bytes` bytes.
        assert_eq!(unsafe { copy(to.at, from.at, from.bytes, self.stream) }, code::SUCCESS);
    }
}

#[test]
fn replay_uses_memory_contents_at_replay_time() {
    let gpu = EmulatedGpu::open();
    let product = gpu.kernel(ROWS, &[], "product");
    let (a, b, y) = (gpu.upload(&[2f32; 8]), gpu.alloc(32), gpu.alloc(32));
    gpu.begin_capture(1);
    gpu.copy(b, a);
    // The array of arguments is dropped before the replay: the captured graph must have copies of the
    // arguments.
    gpu.launch(
        product,
        LaunchShape(1, 64, 0),
        &[KernelArg::At(y), KernelArg::At(a), KernelArg::At(b), KernelArg::U32(8)],
    );
    // SAFETY: the 4 bytes are inside the allocation `a`.
    assert_eq!(unsafe { (gpu.driver.fill)(a.at, 0, 4, gpu.stream) }, code::SUCCESS);
    let executable = gpu.instantiate(gpu.end_capture().unwrap());
    assert!(gpu.download::<f32>(y).iter().all(|v| v.is_nan()), "a capture runs nothing");
    for (value, first, rest) in [(2f32, 4f32, 4f32), (3.0, 9.0, 9.0)] {
        gpu.write(a, &[value; 8]);
        gpu.replay(executable);
        let got = gpu.download::<f32>(y);
        assert_eq!((got[0], got[7]), (first, rest));
        assert_eq!(gpu.download::<f32>(a)[..2], [0.0, value]);
    }
    gpu.replay(executable);
    assert_eq!(gpu.download::<f32>(y), [0.0, 9.0, 9.0, 9.0, 9.0, 9.0, 9.0, 9.0]);
    // SAFETY: `executable` is not used afterwards.
    assert_eq!(unsafe { (gpu.driver.graph_executable_destroy)(executable) }, code::SUCCESS);
}

#[test]
fn waiting_or_allocating_invalidates_a_capture() {
    let gpu = EmulatedGpu::open();
    gpu.begin_capture(1);
    assert_eq!(gpu.synchronize(), code::CAPTURE_UNSUPPORTED);
    assert_eq!(gpu.end_capture(), Err(INVALIDATED));
    assert_eq!(gpu.end_capture(), Err(NOT_CAPTURING));

    for mode in [0, 1] {
        gpu.begin_capture(mode);
        let mut at = std::ptr::null_mut();
        // SAFETY: the driver writes the address to `at`, which is writable.
        assert_eq!(unsafe { (gpu.driver.alloc)(&raw mut at, 64) }, code::CAPTURE_UNSUPPORTED);
        assert_eq!(gpu.end_capture(), Err(INVALIDATED));
    }
    gpu.begin_capture(2); // Relaxed mode permits calls that other modes reject during a capture.
    let memory = gpu.alloc(64);
    gpu.instantiate(gpu.end_capture().unwrap());
    gpu.free(memory);
}

#[test]
fn thread_local_capture_lets_other_threads_allocate() {
    let gpu = EmulatedGpu::open();
    for (mode, expected) in [(1, code::SUCCESS), (0, code::CAPTURE_UNSUPPORTED)] {
        gpu.begin_capture(mode);
        let alloc = gpu.driver.alloc;
        let other = std::thread::spawn(move || {
            let mut at = std::ptr::null_mut();
            // SAFETY: the driver writes the address to `at`, which is writable.
            unsafe { alloc(&raw mut at, 64) }
        });
        assert_eq!(other.join_bounded(), expected);
        assert_eq!(gpu.end_capture().is_ok(), expected == code::SUCCESS);
    }
}

/// Captures a launch on a second stream that waits for an event of the first; joins the streams again if
/// `join`.
fn fork(gpu: &EmulatedGpu, join: bool) -> Result<DriverPtr, DriverStatus> {
    let (mut secondary, mut event) = (std::ptr::null_mut(), std::ptr::null_mut());
    let a = gpu.upload(&[1u8; 16]);
    gpu.begin_capture(1);
    // SAFETY: `secondary` and `event` are writable, both exist when they are used, and `a` has 16 bytes.
    unsafe {
        let d = &gpu.driver;
        assert_eq!((d.stream_create)(&raw mut secondary, 1), 0);
        assert_eq!((d.event_create)(&raw mut event, 2), 0);
        assert_eq!((d.event_record)(event, gpu.stream), 0);
        assert_eq!((d.stream_wait)(secondary, event, 0), 0);
        assert_eq!((d.fill)(a.at, 7, 16, secondary), 0);
        if join {
            assert_eq!((d.event_record)(event, secondary), 0);
            assert_eq!((d.stream_wait)(gpu.stream, event, 0), 0);
        }
    }
    let graph = gpu.end_capture()?;
    let executable = gpu.instantiate(graph);
    assert_eq!(gpu.download::<u8>(a), [1; 16]);
    gpu.replay(executable);
    assert_eq!(gpu.download::<u8>(a), [7; 16]);
    Ok(executable)
}

#[test]
fn capture_includes_waiting_streams_and_requires_join() {
    let gpu = EmulatedGpu::open();
    assert!(fork(&gpu, true).is_ok());
    assert_eq!(fork(&gpu, false), Err(UNJOINED_STREAM));
}

#[test]
#[ignore = "run by lazy_streams_run_only_when_waited_for"]
fn lazy_streams() {
    let gpu = EmulatedGpu::open();
    let mut pinned: DriverPtr = std::ptr::null_mut();
    let memory = gpu.upload(&[5u8; 64]);
    // SAFETY: the variables for new handles are writable, source and destination of the copy have 64 bytes,
    // and the event is recorded before the wait.
    unsafe {
        let d = &gpu.driver;
        let mut event = std::ptr::null_mut();
        assert_eq!((d.host_alloc)(&raw mut pinned, 64, 0), 0);
        assert_eq!((d.event_create)(&raw mut event, 2), 0);
        assert_eq!((d.copy_to_host)(pinned, memory.at, 64, gpu.stream), 0);
        assert_eq!((d.event_record)(event, gpu.stream), 0);
        assert_eq!((d.fill)(memory.at, 6, 64, gpu.stream), 0);
        assert_eq!(pinned.cast::<u8>().read(), 0xff, "read before the copy");
        assert_eq!((d.event_synchronize)(event), 0);
        assert_eq!(pinned.cast::<u8>().read(), 5);
    }
    assert_eq!(gpu.download::<u8>(memory), [6; 64]);
}

#[test]
fn lazy_streams_run_only_when_waited_for() {
    child_process::passed(&child_process::run(
        "capture::lazy_streams",
        &[("HIPEMU_LAZY", "1")].into(),
    ));
}

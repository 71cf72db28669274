//! Operations of the GPU backend other than kernels: memory, copies, fences (GPU events), timestamps and
//! captured graphs.

use crate::deadlines::BoundedJoin as _;
use device::{DType, DeviceDriver, DeviceStream, MatRef, PinnedBuffer};
use kernels::TensorAdd;

use crate::device_pair::{CpuGpuMatrix, CpuGpuPair, bytes_of, elements_of, pairs};
use crate::support::S;

const FLOATS: usize = 1000;

/// Computes `y = a + b` on the GPU.
fn add(pair: &CpuGpuPair, y: &mut CpuGpuMatrix, a: MatRef<'_>, b: MatRef<'_>) {
    pair.gpu.launch(&S, TensorAdd { y: y.gpu_mut(), a, b }).unwrap();
}

fn gpu_floats(pair: &CpuGpuPair, twin: &CpuGpuMatrix) -> Vec<f32> {
    let mut bytes = vec![0; FLOATS * 4];
    pair.gpu.download(&S, &twin.gpu, 0, &mut bytes).unwrap();
    elements_of(&bytes)
}

fn pinned(pair: &CpuGpuPair, value: f32) -> PinnedBuffer {
    let mut memory = pair.gpu.alloc_pinned(FLOATS * 4).unwrap();
    memory.bytes_mut()[..FLOATS * 4].copy_from_slice(&bytes_of(&[value; FLOATS]));
    memory
}

#[test]
fn memory_is_zero_and_aligned() {
    for pair in &pairs() {
        for bytes in [0, 1, 255, 4096, 1_000_001] {
            let buffer = pair.gpu.alloc(bytes).unwrap();
            assert!(buffer.bytes() >= bytes);
            let mut host = vec![1u8; buffer.bytes()];
            pair.gpu.download(&S, &buffer, 0, &mut host).unwrap();
            assert!(host.iter().all(|&b| b == 0), "{bytes} bytes");
        }
        let pinned = pair.gpu.alloc_pinned(777).unwrap();
        assert!(pinned.bytes().len() >= 777 && pinned.bytes().iter().all(|&b| b == 0));
        let info = pair.gpu.mem_info();
        assert!(info.free_bytes > 0 && info.free_bytes <= info.total_bytes, "{info:?}");
    }
}

/// A copy is ordered after earlier launches and before later ones on its stream, without a wait of the host.
#[test]
fn copies_keep_order() {
    for pair in &pairs() {
        let mut x = pair.put(&[1f32; FLOATS], 1, FLOATS);
        let mut y = pair.poisoned(DType::F32, 1, FLOATS);
        let mut flights = Vec::new();
        for value in [2.0, 3.0] {
            let upload = pair.gpu.start_upload(&S, &mut x.gpu, pinned(pair, value), FLOATS * 4);
            flights.push(upload.unwrap());
            add(pair, &mut y, x.gpu(), x.gpu());
            let download = pair.gpu.start_download(&S, &y.gpu, pinned(pair, -1.0), FLOATS * 4);
            flights.push(download.unwrap());
        }
        for (flight, value) in flights.into_iter().zip([2.0, 4.0, 3.0, 6.0]) {
            let memory = flight.wait().unwrap();
            let floats: Vec<f32> = elements_of(&memory.bytes()[..FLOATS * 4]);
            assert!(floats.iter().all(|&x| x == value), "{value}: {floats:?}");
        }
    }
}

/// A replayed graph reads what its buffers contain at the time of the replay.
#[test]
fn graphs_replay() {
    for pair in &pairs() {
        assert!(pair.gpu.captures_graphs());
        let mut x = pair.put(&[1f32; FLOATS], 1, FLOATS);
        let mut y = pair.poisoned(DType::F32, 1, FLOATS);
        let mut z = pair.poisoned(DType::F32, 1, FLOATS);
        // The first launch compiles the kernel, which is not permitted during a capture.
        add(pair, &mut y, x.gpu(), x.gpu());
        assert_eq!(gpu_floats(pair, &y), [2.0; FLOATS]);
        pair.gpu.begin_capture(&S).unwrap();
        add(pair, &mut y, x.gpu(), x.gpu());
        add(pair, &mut z, y.gpu(), y.gpu());
        let graph = pair.gpu.end_capture(&S).unwrap();
        for value in [5f32, 7.0] {
            pair.gpu.upload(&mut x.gpu, 0, &bytes_of(&[value; FLOATS])).unwrap();
            pair.gpu.replay(&S, &graph).unwrap();
            assert_eq!(gpu_floats(pair, &z), [4.0 * value; FLOATS]);
        }
    }
}

/// Calls that would invalidate a capture return an error, and the capture remains valid.
#[test]
fn unsafe_calls_during_capture_are_rejected() {
    for pair in &pairs() {
        let mut x = pair.put(&[1f32; FLOATS], 1, FLOATS);
        let mut y = pair.poisoned(DType::F32, 1, FLOATS);
        add(pair, &mut y, x.gpu(), x.gpu());
        let host = pinned(pair, 3.0);
        let mut bytes = vec![0; 4];
        pair.gpu.begin_capture(&S).unwrap();
        let errors = [
            pair.gpu.alloc(4).err(),
            pair.gpu.alloc_pinned(4).err(),
            pair.gpu.upload(&mut x.gpu, 0, &[0; 4]).err(),
            pair.gpu.download(&S, &x.gpu, 0, &mut bytes).err(),
            pair.gpu.start_upload(&S, &mut x.gpu, host, 4).err(),
            pair.gpu.synchronize(&S).err(),
            pair.gpu.begin_capture(&S).err(),
        ];
        add(pair, &mut y, x.gpu(), x.gpu());
        let graph = pair.gpu.end_capture(&S).unwrap();
        for error in errors {
            let error = error.expect("rejected").to_string();
            assert!(error.ends_with("is not allowed during graph capture"), "{error}");
        }
        pair.gpu.upload(&mut x.gpu, 0, &bytes_of(&[4f32; FLOATS])).unwrap();
        pair.gpu.replay(&S, &graph).unwrap();
        assert_eq!(gpu_floats(pair, &y), [8.0; FLOATS]);
        assert!(pair.gpu.end_capture(&S).is_err(), "no active capture");
    }
}

/// Freeing memory waits for the device, which a capture does not permit, so it is deferred until the capture
/// ends. Other tests allocate memory of the same device at the same time, so it suffices that one of several
/// attempts shows the freed memory.
#[test]
fn memory_dropped_in_a_capture_is_freed_after_it() {
    const ATTEMPTS: usize = 20;
    for pair in &pairs() {
        assert!((0..ATTEMPTS).any(|_| frees_after_capture(pair)), "the memory is not freed");
    }
}

/// Whether the free memory grows by about the size of an allocation that is dropped during a capture.
fn frees_after_capture(pair: &CpuGpuPair) -> bool {
    let x = pair.put(&[1f32; FLOATS], 1, FLOATS);
    let mut y = pair.poisoned(DType::F32, 1, FLOATS);
    add(pair, &mut y, x.gpu(), x.gpu());
    let large = pair.gpu.alloc(64 << 20).unwrap();
    let free_bytes = pair.gpu.mem_info().free_bytes;
    pair.gpu.begin_capture(&S).unwrap();
    drop(large);
    add(pair, &mut y, x.gpu(), x.gpu());
    pair.gpu.end_capture(&S).unwrap();
    pair.gpu.mem_info().free_bytes >= free_bytes + (60 << 20)
}

/// A fence that one thread records can be awaited by another thread.
#[test]
fn fences_can_be_awaited_on_other_threads() {
    for pair in &pairs() {
        let x = pair.put(&[21f32; FLOATS], 1, FLOATS);
        let mut y = pair.poisoned(DType::F32, 1, FLOATS);
        add(pair, &mut y, x.gpu(), x.gpu());
        let flight = pair.gpu.start_download(&S, &y.gpu, pinned(pair, 0.0), FLOATS * 4).unwrap();
        let waiter = std::thread::spawn(move || flight.wait().unwrap());
        let memory = waiter.join_bounded();
        let floats: Vec<f32> = elements_of(&memory.bytes()[..FLOATS * 4]);
        assert_eq!(floats, [42.0; FLOATS]);
        // The download is dropped without a wait: its memory stays allocated until the copy has completed.
        drop(pair.gpu.start_download(&S, &y.gpu, memory, FLOATS * 4).unwrap());
        pair.gpu.synchronize(&S).unwrap();
        assert!(pair.gpu.synchronize(&DeviceStream(99)).is_err());
    }
}

/// GPU events record timestamps after launches; a captured graph records them in every replay.
#[test]
fn timestamps_separate_launches() {
    for pair in &pairs() {
        let x = pair.put(&[1f32; FLOATS], 1, FLOATS);
        let mut y = pair.poisoned(DType::F32, 1, FLOATS);
        let timestamps = pair.gpu.alloc_timestamps(4).unwrap();
        let in_order = |order: &[usize]| {
            timestamps.wait(order[order.len() - 1]).unwrap();
            let ns = order.windows(2).map(|pair| timestamps.elapsed_ns(pair[0], pair[1]).unwrap());
            assert!(ns.clone().all(|ns| ns >= 0), "{:?}", ns.collect::<Vec<_>>());
        };
        timestamps.record(&S, 0).unwrap();
        pair.gpu.begin_kernel_timestamps(&timestamps, 1);
        add(pair, &mut y, x.gpu(), x.gpu());
        add(pair, &mut y, x.gpu(), x.gpu());
        let names = pair.gpu.end_kernel_timestamps();
        assert!(names.len() == 2 && names[0] == names[1], "{names:?}");
        add(pair, &mut y, x.gpu(), x.gpu());
        in_order(&[0, 1, 2]);
        pair.gpu.begin_kernel_timestamps(&timestamps, 3);
        add(pair, &mut y, x.gpu(), x.gpu());
        add(pair, &mut y, x.gpu(), x.gpu());
        assert_eq!(
            pair.gpu.end_kernel_timestamps().len(),
            1,
            "limited by the number of timestamps"
        );

        pair.gpu.begin_capture(&S).unwrap();
        pair.gpu.begin_kernel_timestamps(&timestamps, 1);
        add(pair, &mut y, x.gpu(), x.gpu());
        assert_eq!(pair.gpu.end_kernel_timestamps().len(), 1);
        let graph = pair.gpu.end_capture(&S).unwrap();
        for _ in 0..2 {
            timestamps.record(&S, 0).unwrap();
            pair.gpu.replay(&S, &graph).unwrap();
            timestamps.record(&S, 2).unwrap();
            in_order(&[0, 1, 2]);
        }
        assert!(timestamps.record(&S, 4).is_err() && timestamps.elapsed_ns(0, 4).is_err());
        pair.gpu.synchronize(&S).unwrap();
    }
}

/// A dry run compiles kernels and has no other effect. A capture may then use the kernels without an earlier
/// launch.
#[test]
fn dry_run_only_compiles() {
    for pair in &pairs() {
        let x = pair.put(&[3f32; FLOATS], 1, FLOATS);
        let mut y = pair.put(&[-1f32; FLOATS], 1, FLOATS);
        pair.gpu.begin_dry_run();
        add(pair, &mut y, x.gpu(), x.gpu());
        pair.gpu.end_dry_run(&mut |_, _| {}).unwrap();
        assert_eq!(gpu_floats(pair, &y), [-1.0; FLOATS]);
        pair.gpu.begin_capture(&S).unwrap();
        add(pair, &mut y, x.gpu(), x.gpu());
        let graph = pair.gpu.end_capture(&S).unwrap();
        pair.gpu.replay(&S, &graph).unwrap();
        assert_eq!(gpu_floats(pair, &y), [6.0; FLOATS]);
    }
}

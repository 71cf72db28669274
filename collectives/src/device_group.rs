//! Group of ranks that are GPUs. The ranks first exchange a communicator id through shared memory; collective
//! calls then use an RCCL or NCCL communicator, in stream order. If all GPUs have peer access, small
//! all-reduces use a one-shot kernel through peer memory instead.
//!
//! A collective call returns after its launch. A [`LaunchedCollectives`] confirms that the device has
//! completed the launched calls.

use std::cell::RefCell;
use std::sync::Arc;

use device::gpu::PeerMemoryView;
use device::{Buffer, DType, DeviceDriver, DeviceError, DeviceStream, MatMut, MatRef};
use kernels::gpu::GpuBackend;
use kernels::{AllReduceShape, OneShotAllReduce, OneShotAllReduceNorm};

use crate::collective_call::CollectiveCallShape;
use crate::communicator::GpuCommunicator;
use crate::communicator_bootstrap::join_communicator;
use crate::group_watchdog::{GroupWatchdog, LaunchedCollectives};
use crate::peer_memory_group::PeerMemoryGroup;
use crate::shared_memory_group::SharedMemoryGroup;
use crate::{
    AllReduceNormArgs, AllToAllRowCounts, CollectiveBackend, CollectiveCall, CollectiveError,
    CollectiveOp,
};

/// Size limit of one-shot all-reduces: number of bytes that a rank receives from all peers together.
/// All-reduces of larger matrices use NCCL or RCCL. For a matrix of 1 MiB on two H200 GPUs, the largest size
/// measured, the one-shot kernel takes 9.6 µs and NCCL takes 15.4 µs.
const ONE_SHOT_MAX_BYTES: usize = 1 << 20;

/// Membership of one rank in a group of ranks that are GPUs. Dropping this value leaves the group, which
/// makes the group fail on all other ranks.
#[derive(Debug)]
pub struct DeviceGroup {
    /// Must be the first field: fields are dropped in order, and the watchdog thread must end before the
    /// communicator is dropped.
    watchdog: GroupWatchdog,
    gpu: Arc<GpuBackend>,
    communicator: Arc<GpuCommunicator>,
    /// Peer memory of all ranks; `None` if one-shot all-reduces are disabled, or if a rank has no peer
    /// access.
    peers: Option<PeerMemoryGroup>,
    /// Reason why a rank has no peer access; `None` if all ranks have peer access.
    peer_access_error: Option<CollectiveError>,
    shared_group: SharedMemoryGroup,
    /// Collective calls that were launched since the start of a graph capture; `None` outside of a capture.
    captured_calls: RefCell<Option<Vec<CollectiveCall>>>,
    /// Device buffer with one element; a barrier is an all-reduce of this element.
    barrier_buffer: RefCell<Buffer>,
}

impl DeviceGroup {
    /// Joins the device group of the ranks of `shared`; each rank has a separate device.
    ///
    /// Errors: no collective library was found, a rank has failed, or the devices cannot connect.
    pub fn join(
        shared: SharedMemoryGroup,
        device: &Arc<GpuBackend>,
    ) -> Result<Self, CollectiveError> {
        let peers = shared.size().saturating_sub(1).max(1);
        Self::join_with_custom_all_reduce_limit(shared, device, ONE_SHOT_MAX_BYTES / peers)
    }

    /// Joins the device group of the ranks of `shared`. Matrices of up to `one_shot_bytes` bytes use one-shot
    /// all-reduces; 0 disables one-shot all-reduces. All ranks must pass the same limit.
    pub fn join_with_custom_all_reduce_limit(
        shared: SharedMemoryGroup,
        device: &Arc<GpuBackend>,
        one_shot_bytes: usize,
    ) -> Result<Self, CollectiveError> {
        let health = Arc::new(shared.health());
        let communicator = Arc::new(join_communicator(&shared, &health, device)?);
        let (peers, peer_access_error) = match one_shot_bytes {
            0 => (None, None),
            bytes => match PeerMemoryGroup::open(&shared, device, bytes)? {
                Ok(peers) => (Some(peers), None),
                Err(error) => (None, Some(error)),
            },
        };
        let watchdog =
            GroupWatchdog::start(&health, &communicator, peers.as_ref().map(|p| &p.memory))?;
        Ok(Self {
            watchdog,
            gpu: Arc::clone(device),
            communicator,
            peers,
            peer_access_error,
            shared_group: shared,
            captured_calls: RefCell::default(),
            barrier_buffer: RefCell::new(device.alloc(size_of::<f32>())?),
        })
    }

    /// Whether an all-reduce of this shape uses the one-shot kernel instead of NCCL or RCCL.
    #[must_use]
    pub fn uses_one_shot_all_reduce(&self, rows: usize, cols: usize, dtype: DType) -> bool {
        self.one_shot_peers(rows, cols, dtype).is_some()
    }

    /// Returns the peer memory for a one-shot all-reduce of this shape; `None` if the all-reduce uses NCCL or
    /// RCCL.
    fn one_shot_peers(&self, rows: usize, cols: usize, dtype: DType) -> Option<&PeerMemoryView> {
        let shape = AllReduceShape { rows, cols, dtype };
        let fits = |peers: &&PeerMemoryView| OneShotAllReduce::fits(&self.gpu, peers, shape);
        self.peers.as_ref().map(|peers| &peers.view).filter(fits)
    }

    /// Reason why a rank has no peer access. In this case, all all-reduces use NCCL or RCCL.
    #[must_use]
    pub fn peer_access_error(&self) -> Option<&CollectiveError> {
        self.peer_access_error.as_ref()
    }

    /// Launches a collective call and records it in shared memory, or in `captured_calls` during graph
    /// capture.
    fn launch_call(
        &self,
        op: CollectiveOp,
        shape: CollectiveCallShape,
        launch: impl FnOnce(&GpuCommunicator) -> Result<(), DeviceError>,
    ) -> Result<(), CollectiveError> {
        if self.communicator.is_dry_run() {
            return Ok(launch(&self.communicator)?);
        }
        self.watchdog.health.check()?;
        let is_captured = {
            let mut captured = self.captured_calls.borrow_mut();
            let call = CollectiveCall::new(op, shape);
            captured.as_mut().map(|calls| calls.push(call)).is_some()
        };
        if !is_captured {
            self.shared_group.record_call(CollectiveCall::new(op, shape));
        }
        launch(&self.communicator).map_err(|error| self.fail_with(error))
    }

    /// Makes the group fail, unless `error` is a shape or dtype error. If another rank has failed, returns
    /// the failure of that rank instead of `error`, because the failure of that rank has caused `error`.
    fn fail_with(&self, error: DeviceError) -> CollectiveError {
        let is_rejected =
            matches!(error, DeviceError::Shape { .. } | DeviceError::Unsupported { .. });
        if is_rejected {
            return error.into();
        }
        let health = &self.watchdog.health;
        let error =
            health.check().and_then(|()| health.check_peers()).err().unwrap_or(error.into());
        self.shared_group.fail(health.fail(error))
    }
}

impl CollectiveBackend for DeviceGroup {
    fn rank(&self) -> usize {
        self.shared_group.rank()
    }

    fn size(&self) -> usize {
        self.shared_group.size()
    }

    fn all_reduce(&self, s: &DeviceStream, x: MatMut<'_>) -> Result<(), CollectiveError> {
        let shape = CollectiveCallShape::of(x.as_ref());
        let peers = self.one_shot_peers(x.rows(), x.cols(), x.dtype());
        self.launch_call(CollectiveOp::AllReduce, shape, |library| match peers {
            Some(peers) => self.gpu.launch(s, OneShotAllReduce { x, peers }),
            None => library.all_reduce(s, x),
        })
    }

    fn fuses_all_reduce_norm(&self, rows: usize, cols: usize, dtype: DType) -> bool {
        self.peers.as_ref().is_some_and(|peers| {
            let shape = AllReduceShape { rows, cols, dtype };
            OneShotAllReduceNorm::fits(&self.gpu, &peers.view, shape)
        })
    }

    fn all_reduce_norm(
        &self,
        s: &DeviceStream,
        args: AllReduceNormArgs<'_>,
    ) -> Result<(), CollectiveError> {
        let AllReduceNormArgs { y, x, delta, weight, eps } = args;
        let shape = CollectiveCallShape::of(delta);
        let Some(PeerMemoryGroup { view: peers, .. }) = &self.peers else {
            let dtype = shape.dtype;
            return Err(CollectiveError::Dtype { collective: "all_reduce_norm", dtype });
        };
        self.launch_call(CollectiveOp::AllReduce, shape, |_| {
            self.gpu.launch(s, OneShotAllReduceNorm { y, x, delta, weight, eps, peers })
        })
    }

    fn all_gather(
        &self,
        s: &DeviceStream,
        own: MatRef<'_>,
        all: MatMut<'_>,
    ) -> Result<(), CollectiveError> {
        let shape = CollectiveCallShape::of(own);
        self.launch_call(CollectiveOp::AllGather, shape, |library| library.all_gather(s, own, all))
    }

    fn all_gather_rows(
        &self,
        s: &DeviceStream,
        own: MatRef<'_>,
        all: MatMut<'_>,
    ) -> Result<(), CollectiveError> {
        let shape = CollectiveCallShape { rows: all.rows(), ..CollectiveCallShape::of(own) };
        self.launch_call(CollectiveOp::AllGatherRows, shape, |library| {
            library.all_gather_rows(s, own, all)
        })
    }

    fn reduce_scatter(
        &self,
        s: &DeviceStream,
        x: MatRef<'_>,
        own: MatMut<'_>,
    ) -> Result<(), CollectiveError> {
        self.launch_call(CollectiveOp::ReduceScatter, CollectiveCallShape::of(x), |library| {
            library.reduce_scatter(s, x, own)
        })
    }

    /// Exchanges row counts between the ranks through shared host memory, not through the devices.
    fn exchange_counts(&self, to: &[usize]) -> Result<AllToAllRowCounts, CollectiveError> {
        if self.communicator.is_capturing() {
            return Err(CollectiveError::NotCapturable { collective: "exchange_counts" });
        }
        self.watchdog.health.check()?;
        self.shared_group.exchange_counts(to)
    }

    fn all_to_all(
        &self,
        s: &DeviceStream,
        x: MatRef<'_>,
        y: MatMut<'_>,
        counts: &AllToAllRowCounts,
    ) -> Result<(), CollectiveError> {
        if self.communicator.is_capturing() {
            return Err(CollectiveError::NotCapturable { collective: "all_to_all" });
        }
        let (size, rank) = (self.size(), self.rank());
        let receive_rows: Vec<usize> = (0..size).map(|from| counts.rows_from(from)[rank]).collect();
        let shape = CollectiveCallShape {
            rows: counts.rows_to_other_ranks(),
            ..CollectiveCallShape::of(x)
        };
        self.launch_call(CollectiveOp::AllToAll, shape, |library| {
            library.all_to_all(s, x, counts.rows_from(rank), y, &receive_rows)
        })
    }

    fn broadcast(
        &self,
        s: &DeviceStream,
        x: MatMut<'_>,
        from: usize,
    ) -> Result<(), CollectiveError> {
        let shape = CollectiveCallShape::of(x.as_ref());
        self.launch_call(CollectiveOp::Broadcast(from), shape, |library| {
            library.broadcast(s, x, from)
        })
    }

    /// Blocks the stream `s` until all ranks have reached the barrier, and blocks the host until `s` has
    /// completed. During graph capture, the host is not blocked.
    fn barrier(&self, s: &DeviceStream) -> Result<(), CollectiveError> {
        let mut buffer = self.barrier_buffer.borrow_mut();
        let x = buffer.mat_mut(DType::F32, 1, 1)?;
        self.launch_call(CollectiveOp::Barrier, CollectiveCallShape::EMPTY, |library| {
            library.all_reduce(s, x)?;
            if library.is_capturing() { Ok(()) } else { library.synchronize(s) }
        })?;
        self.watchdog.health.check()
    }

    fn begin_capture(&self) {
        self.captured_calls.replace(Some(Vec::new()));
    }

    fn end_capture(&self) -> Vec<CollectiveCall> {
        self.captured_calls.take().unwrap_or_default()
    }

    fn on_replayed(&self, calls: &[CollectiveCall]) -> Result<(), CollectiveError> {
        self.watchdog.health.check()?;
        for &call in calls {
            self.shared_group.record_call(call);
        }
        Ok(())
    }

    fn launch_checkpoint(&self) -> Option<LaunchedCollectives> {
        Some(LaunchedCollectives::new(&self.watchdog.health, self.shared_group.last_call()))
    }
}

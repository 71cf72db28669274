//! A rank of a group whose ranks are GPUs: it meets the others in shared memory, and everything after that goes
//! through a communicator, in the order of a stream. Small sums go through memory that the GPUs share, where they reach
//! each other's.
//!
//! Calls return when the device has been told. What it has come past shows later, see [`Launched`].

use crate::shared_group::SharedGroup;
use crate::watch::{Health, Launched, Watch};
use crate::{Call, Collective, CollectiveError, Operation, RowCounts};
use kernels::hip::{Communication, Communicator, CommunicatorId, HipDevice, PeerMemory, PeerOffer};
use kernels::{Buffer, DType, DeviceError, Driver, Mat, MatMut, Stream};
use std::cell::RefCell;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

/// Bytes that all others bring to a rank, up to which a matrix is summed in one shot: larger ones are the library's. At
/// the largest that was measured, 1 MiB between two H200, it takes 9.6 µs where NCCL takes 15.4.
const ONE_SHOT_BYTES: usize = 1 << 20;
/// How long ranks that have met may take to reach each other's devices.
const JOIN: Duration = Duration::from_mins(2);
/// How often they are asked.
const ASK: Duration = Duration::from_millis(1);

/// One rank. Dropping it leaves the group, which ends it for the others.
#[derive(Debug)]
pub struct DeviceGroup {
    /// Before what it watches.
    watch: Watch,
    communicator: Arc<Communicator>,
    /// `None` where a rank does not reach another one's memory, and then why.
    peers: Option<Arc<PeerMemory>>,
    apart: Option<CollectiveError>,
    shared: SharedGroup,
    /// What is being recorded instead of done.
    recording: RefCell<Option<Vec<Call>>>,
    /// A word that ranks bring to a barrier.
    token: RefCell<Buffer>,
}

impl DeviceGroup {
    /// Joins the others of `shared`, each with a device of its own.
    ///
    /// Errors: there is no library for it, a rank is gone, or they do not reach each other.
    pub fn join(shared: SharedGroup, device: &Arc<HipDevice>) -> Result<Self, CollectiveError> {
        let others = shared.size().saturating_sub(1).max(1);
        Self::join_summing(shared, device, ONE_SHOT_BYTES / others)
    }

    /// The same with sums in one shot of up to so many bytes, 0 for none. All ranks say the same.
    pub fn join_summing(
        shared: SharedGroup,
        device: &Arc<HipDevice>,
        one_shot_bytes: usize,
    ) -> Result<Self, CollectiveError> {
        let communication = Communication::open(device)?;
        let (rank, size) = (shared.rank(), shared.size());
        let mut words = match rank {
            0 => communication.new_id()?.words(),
            _ => [0; CommunicatorId::WORDS],
        };
        let told = MatMut::of(&mut words, 1, CommunicatorId::WORDS)?;
        shared.broadcast(&Stream::default(), told, 0)?;
        let health = Arc::new(shared.health());
        let id = CommunicatorId::of_words(&words);
        let communicator = Arc::new(communication.begin(&id, size, rank)?);
        let joined = until_ready(&communicator, &health);
        if let Err(error) = joined {
            communicator.abort();
            return Err(shared.fail(error));
        }
        let (peers, apart) = match one_shot_bytes {
            0 => (None, None),
            bytes => match reach_peers(&shared, device, bytes)? {
                Ok(peers) => (Some(Arc::new(peers)), None),
                Err(error) => (None, Some(error)),
            },
        };
        let watch = Watch::start(&health, &communicator, peers.as_ref())?;
        let token = RefCell::new(device.alloc(size_of::<f32>())?);
        let recording = RefCell::default();
        Ok(Self { watch, communicator, peers, apart, shared, recording, token })
    }

    /// Whether a matrix of this shape is summed through memory that the GPUs share; if not, by the library.
    #[must_use]
    pub fn sums_in_one_shot(&self, rows: usize, cols: usize, dtype: DType) -> bool {
        self.peers.as_ref().is_some_and(|peers| peers.fits(rows, cols, dtype))
    }

    /// Why all sums are the library's, if the GPUs do not reach each other's memory.
    #[must_use]
    pub fn apart(&self) -> Option<&CollectiveError> {
        self.apart.as_ref()
    }

    /// Launches a call, with a note of it where others can read it.
    fn run(
        &self,
        operation: Operation,
        (dtype, rows, cols): (DType, usize, usize),
        launch: impl FnOnce(&Communicator) -> Result<(), DeviceError>,
    ) -> Result<(), CollectiveError> {
        if self.communicator.is_rehearsing() {
            return Ok(launch(&self.communicator)?);
        }
        self.watch.health.check()?;
        let recorded = {
            let mut recording = self.recording.borrow_mut();
            let call = Call::new(operation, dtype, rows, cols);
            recording.as_mut().map(|calls| calls.push(call)).is_some()
        };
        if !recorded {
            self.shared.note(Call::new(operation, dtype, rows, cols));
        }
        launch(&self.communicator).map_err(|error| self.failed(error))
    }

    /// A rank that is gone says more than what the device makes of it.
    fn failed(&self, error: DeviceError) -> CollectiveError {
        let refused = matches!(error, DeviceError::Shape { .. } | DeviceError::Unsupported { .. });
        if refused {
            return error.into();
        }
        let health = &self.watch.health;
        let error = health.check().and_then(|()| health.look()).err().unwrap_or(error.into());
        self.shared.fail(health.fail(error))
    }
}

/// The memory of all ranks, if each of them reaches that of all others, or why not.
fn reach_peers(
    shared: &SharedGroup,
    device: &Arc<HipDevice>,
    one_shot_bytes: usize,
) -> Result<Result<PeerMemory, CollectiveError>, CollectiveError> {
    const WORDS: usize = PeerOffer::WORDS;
    let (s, size) = (Stream::default(), shared.size());
    let own = PeerMemory::offer(device, (size, shared.rank()), one_shot_bytes);
    let offer = own.as_ref().map_or([0; WORDS], |own| own.offered().words());
    let mut all = vec![0; size * WORDS];
    shared.all_gather(&s, Mat::of(&offer, 1, WORDS)?, MatMut::of(&mut all, 1, size * WORDS)?)?;
    let offers: Vec<PeerOffer> = all.as_chunks().0.iter().map(PeerOffer::of_words).collect();
    let reached = own.and_then(|mut own| own.reach(&offers).map(|()| own));
    let mut reach = vec![0; size];
    let told = [i32::from(reached.is_ok())];
    shared.all_gather(&s, Mat::of(&told, 1, 1)?, MatMut::of(&mut reach, 1, size)?)?;
    Ok(match reach.iter().position(|&reached| reached != 1) {
        Some(rank) => Err(reached.err().map_or(CollectiveError::Apart { rank }, Into::into)),
        None => Ok(reached?),
    })
}

/// Waits until all ranks have joined.
fn until_ready(communicator: &Communicator, health: &Health) -> Result<(), CollectiveError> {
    let started = Instant::now();
    while !communicator.is_ready()? {
        health.look()?;
        if started.elapsed() > JOIN {
            return Err(CollectiveError::Unreached { seconds: JOIN.as_secs() });
        }
        thread::sleep(ASK);
    }
    Ok(())
}

impl Collective for DeviceGroup {
    fn rank(&self) -> usize {
        self.shared.rank()
    }

    fn size(&self) -> usize {
        self.shared.size()
    }

    fn all_reduce(&self, s: &Stream, x: MatMut<'_>) -> Result<(), CollectiveError> {
        let what = (x.dtype(), x.rows(), x.cols());
        let peers = self.peers.as_ref().filter(|peers| peers.fits(x.rows(), x.cols(), x.dtype()));
        self.run(Operation::AllReduce, what, |ranks| match peers {
            Some(peers) => peers.all_reduce(s, x),
            None => ranks.all_reduce(s, x),
        })
    }

    fn fuses_norm(&self, rows: usize, cols: usize, dtype: DType) -> bool {
        self.peers.as_ref().is_some_and(|peers| peers.fits_norm(rows, cols, dtype))
    }

    fn all_reduce_norm(
        &self,
        s: &Stream,
        to: (MatMut<'_>, MatMut<'_>),
        delta: Mat<'_>,
        norm: (Mat<'_>, f32),
    ) -> Result<(), CollectiveError> {
        let (dtype, rows, cols) = (delta.dtype(), delta.rows(), delta.cols());
        let Some(peers) = &self.peers else {
            return Err(CollectiveError::Dtype { collective: "all_reduce_norm", dtype });
        };
        self.run(Operation::AllReduce, (dtype, rows, cols), |_| {
            peers.all_reduce_norm(s, to, delta, norm)
        })
    }

    fn all_gather(&self, s: &Stream, own: Mat<'_>, all: MatMut<'_>) -> Result<(), CollectiveError> {
        let what = (own.dtype(), own.rows(), own.cols());
        self.run(Operation::AllGather, what, |ranks| ranks.all_gather(s, own, all))
    }

    fn all_gather_rows(
        &self,
        s: &Stream,
        own: Mat<'_>,
        all: MatMut<'_>,
    ) -> Result<(), CollectiveError> {
        let what = (own.dtype(), all.rows(), own.cols());
        self.run(Operation::AllGatherRows, what, |ranks| ranks.all_gather_rows(s, own, all))
    }

    fn reduce_scatter(
        &self,
        s: &Stream,
        x: Mat<'_>,
        own: MatMut<'_>,
    ) -> Result<(), CollectiveError> {
        let what = (x.dtype(), x.rows(), x.cols());
        self.run(Operation::ReduceScatter, what, |ranks| ranks.reduce_scatter(s, x, own))
    }

    /// Where the ranks met: nothing of it goes through their devices.
    fn exchange_counts(&self, to: &[usize]) -> Result<RowCounts, CollectiveError> {
        if self.communicator.is_capturing() {
            return Err(CollectiveError::Recorded { collective: "exchange_counts" });
        }
        self.watch.health.check()?;
        self.shared.exchange_counts(to)
    }

    fn all_to_all(
        &self,
        s: &Stream,
        x: Mat<'_>,
        y: MatMut<'_>,
        counts: &RowCounts,
    ) -> Result<(), CollectiveError> {
        if self.communicator.is_capturing() {
            return Err(CollectiveError::Recorded { collective: "all_to_all" });
        }
        let (size, rank) = (self.size(), self.rank());
        let came: Vec<usize> = (0..size).map(|from| counts.of(from)[rank]).collect();
        let what = (x.dtype(), counts.crossing(), x.cols());
        let (from, to) = ((x, counts.of(rank)), (y, &came[..]));
        self.run(Operation::AllToAll, what, |ranks| ranks.all_to_all(s, from, to))
    }

    fn broadcast(&self, s: &Stream, x: MatMut<'_>, from: usize) -> Result<(), CollectiveError> {
        let what = (x.dtype(), x.rows(), x.cols());
        self.run(Operation::Broadcast(from), what, |ranks| ranks.broadcast(s, x, from))
    }

    /// In a recording it holds up the device alone.
    fn barrier(&self, s: &Stream) -> Result<(), CollectiveError> {
        let mut token = self.token.borrow_mut();
        let token = token.mat_mut(DType::F32, 1, 1)?;
        self.run(Operation::Barrier, (DType::I32, 0, 0), |ranks| {
            ranks.all_reduce(s, token)?;
            if ranks.is_capturing() { Ok(()) } else { ranks.synchronize(s) }
        })?;
        self.watch.health.check()
    }

    fn begin_recording(&self) {
        self.recording.replace(Some(Vec::new()));
    }

    fn end_recording(&self) -> Vec<Call> {
        self.recording.take().unwrap_or_default()
    }

    fn replayed(&self, calls: &[Call]) -> Result<(), CollectiveError> {
        self.watch.health.check()?;
        for &call in calls {
            self.shared.note(call);
        }
        Ok(())
    }

    fn launched(&self) -> Option<Launched> {
        Some(Launched::new(&self.watch.health, self.shared.newest()))
    }
}

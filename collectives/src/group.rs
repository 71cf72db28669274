//! Collective operations of one parallel axis (TP, EP or DP), as called by one of its ranks.

use std::cell::RefCell;
use std::time::{Duration, Instant};

use device::{DType, DeviceStream, MatMut, MatRef};

use crate::{
    AllToAllRowCounts, CollectiveCall, CollectiveError, CollectiveOp, LaunchedCollectives,
};

/// Transport of the collective operations of one parallel axis. All operations run on stream `s`, in
/// submission order. Every rank must call the same operations in the same order, with matrices of the same
/// shape.
pub trait CollectiveBackend: Send {
    /// Index of this rank in the group, below `size`.
    fn rank(&self) -> usize;

    /// Number of ranks of the group.
    fn size(&self) -> usize;

    /// Computes `x = Σ x` over all ranks. All ranks add in the same order, so that their results are
    /// bit-identical. The order is ascending by rank, except with NCCL or RCCL.
    fn all_reduce(&self, s: &DeviceStream, x: MatMut<'_>) -> Result<(), CollectiveError>;

    /// Whether `all_reduce_norm` supports matrices of this shape. The return value is the same on all ranks.
    fn fuses_all_reduce_norm(&self, _rows: usize, _cols: usize, _dtype: DType) -> bool {
        false
    }

    /// Computes `x += Σ delta` over all ranks, then `y = rms_norm(x)`, in one launch. The result is
    /// bit-identical to the result of separate launches.
    fn all_reduce_norm(
        &self,
        _: &DeviceStream,
        args: AllReduceNormArgs<'_>,
    ) -> Result<(), CollectiveError> {
        Err(CollectiveError::Dtype { collective: "all_reduce_norm", dtype: args.delta.dtype() })
    }

    /// Gathers the columns of `own` of all ranks into `all`, in rank order. If `all` has fewer columns than
    /// all ranks together, the last columns are padding and are dropped.
    fn all_gather(
        &self,
        s: &DeviceStream,
        own: MatRef<'_>,
        all: MatMut<'_>,
    ) -> Result<(), CollectiveError>;

    /// Gathers the rows of `own` of all ranks into `all`, in rank order. `all` has `all.rows / ranks` rows
    /// for every rank; within these rows, the rows after the rows of `own` are filled with 0, or with -1 (the
    /// null index) for integer types.
    fn all_gather_rows(
        &self,
        s: &DeviceStream,
        own: MatRef<'_>,
        all: MatMut<'_>,
    ) -> Result<(), CollectiveError>;

    /// Computes `Σ x` over all ranks, added in rank order. `x` has `x.rows / ranks` rows for every rank. Of
    /// this rank's rows of the sum, the first `own.rows` rows are written to `own`.
    fn reduce_scatter(
        &self,
        s: &DeviceStream,
        x: MatRef<'_>,
        own: MatMut<'_>,
    ) -> Result<(), CollectiveError>;

    /// Sends the numbers of rows `to[r]` that this rank will send to each rank `r`, and returns the numbers
    /// of all ranks. The call cannot be captured into a graph, because the host waits for the numbers.
    fn exchange_counts(&self, to: &[usize]) -> Result<AllToAllRowCounts, CollectiveError>;

    /// Sends the rows of `x` to the ranks. `counts` contains the number of rows for each rank, and `x`
    /// contains the rows in the order of their destination ranks. The received rows are written to the start
    /// of `y`, in the order of their source ranks. All ranks pass the same `counts`. The call cannot be
    /// captured into a graph, because the host needs `counts`.
    fn all_to_all(
        &self,
        s: &DeviceStream,
        x: MatRef<'_>,
        y: MatMut<'_>,
        counts: &AllToAllRowCounts,
    ) -> Result<(), CollectiveError>;

    /// Copies the matrix `x` of rank `from` to the matrix `x` of every other rank.
    fn broadcast(
        &self,
        s: &DeviceStream,
        x: MatMut<'_>,
        from: usize,
    ) -> Result<(), CollectiveError>;

    /// Returns after every rank of the group has called `barrier`.
    fn barrier(&self, s: &DeviceStream) -> Result<(), CollectiveError>;

    /// Starts to record the collective calls that are captured into a graph. Backends whose calls complete
    /// before they return do nothing, because their calls cannot be captured.
    fn begin_capture(&self) {}

    /// Stops recording and returns the calls that were recorded since `begin_capture`.
    fn end_capture(&self) -> Vec<CollectiveCall> {
        Vec::new()
    }

    /// Records the calls of a captured graph after each replay; `_calls` is the result of `end_capture`.
    fn on_replayed(&self, _calls: &[CollectiveCall]) -> Result<(), CollectiveError> {
        Ok(())
    }

    /// Returns a [`LaunchedCollectives`] that covers all calls launched so far; `None` if calls complete
    /// before they return.
    fn launch_checkpoint(&self) -> Option<LaunchedCollectives> {
        None
    }
}

/// Arguments of an all-reduce that is fused with a residual addition and an RMS norm.
#[derive(Debug)]
pub struct AllReduceNormArgs<'a> {
    /// Output: `rms_norm(x)` after the update of `x`, `[tokens, hidden size]`.
    pub y: MatMut<'a>,
    /// Residual stream `[tokens, hidden size]`, updated in place.
    pub x: MatMut<'a>,
    /// This rank's partial sum of the attention or MLP output that is added to the residual stream, `[tokens,
    /// hidden size]`.
    pub delta: MatRef<'a>,
    /// Weight of the RMS norm `[hidden size]`, in the type of `x` or in f32.
    pub weight: MatRef<'a>,
    /// Epsilon of the RMS norm, which is added to the mean square.
    pub eps: f32,
}

/// State of partial sums after [`ParallelGroup::all_reduce_before_norm`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AllReduceState {
    /// The matrix has the sums over all ranks.
    Complete,
    /// The matrix still has this rank's partial sums. [`ParallelGroup::all_reduce_norm`] or
    /// [`ParallelGroup::all_reduce`] completes them.
    Deferred,
}

/// Group of the ranks on one parallel axis: TP, EP or DP. A group of one rank has no transport, and its
/// collective operations do nothing.
pub struct ParallelGroup {
    backend: Option<Box<dyn CollectiveBackend>>,
    /// Accumulated host time of each operation since the last call of [`ParallelGroup::take_times`].
    times: RefCell<Vec<CollectiveHostTime>>,
}

/// Accumulated host time of one operation, including the time spent waiting for other ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CollectiveHostTime {
    /// Collective operation whose calls are measured.
    pub op: CollectiveOp,
    /// Sum of the durations from the start of a call to its return.
    pub time: Duration,
}

impl ParallelGroup {
    /// Creates a group that contains only this rank.
    #[must_use]
    pub fn single() -> Self {
        Self { backend: None, times: RefCell::default() }
    }

    /// Creates a group whose collective operations use the transport `backend`.
    #[must_use]
    pub fn new(backend: Box<dyn CollectiveBackend>) -> Self {
        Self { backend: (backend.size() > 1).then_some(backend), times: RefCell::default() }
    }

    /// Index of this rank in the group.
    #[must_use]
    pub fn rank(&self) -> usize {
        self.backend.as_ref().map_or(0, |backend| backend.rank())
    }

    /// Number of ranks of the group, at least 1.
    #[must_use]
    pub fn size(&self) -> usize {
        self.backend.as_ref().map_or(1, |backend| backend.size())
    }

    /// Starts to record the collective calls that are captured into a graph.
    pub fn begin_capture(&self) {
        if let Some(backend) = &self.backend {
            backend.begin_capture();
        }
    }

    /// Returns the calls recorded since `begin_capture`. Pass them to [`ParallelGroup::on_replayed`] after
    /// each replay.
    #[must_use]
    pub fn end_capture(&self) -> Vec<CollectiveCall> {
        self.backend.as_ref().map_or_else(Vec::new, |backend| backend.end_capture())
    }

    /// Records the calls of a captured graph after a replay of the graph.
    ///
    /// Errors: the group has failed.
    pub fn on_replayed(&self, calls: &[CollectiveCall]) -> Result<(), CollectiveError> {
        self.backend.as_ref().map_or(Ok(()), |backend| backend.on_replayed(calls))
    }

    /// Returns a [`LaunchedCollectives`] that covers all calls launched so far; `None` if calls complete
    /// before they return.
    #[must_use]
    pub fn launch_checkpoint(&self) -> Option<LaunchedCollectives> {
        self.backend.as_ref().and_then(|backend| backend.launch_checkpoint())
    }

    /// Returns and resets the accumulated host times of the operations. On a device with asynchronous
    /// launches, the times only include the launches.
    pub fn take_times(&self) -> Vec<CollectiveHostTime> {
        self.times.take()
    }

    /// Runs a collective call and adds its duration to `times`.
    fn timed<T>(
        &self,
        backend: &dyn CollectiveBackend,
        op: CollectiveOp,
        call: impl FnOnce(&dyn CollectiveBackend) -> Result<T, CollectiveError>,
    ) -> Result<T, CollectiveError> {
        let started = Instant::now();
        let result = call(backend);
        let time = started.elapsed();
        let mut times = self.times.borrow_mut();
        match times.iter_mut().find(|entry| entry.op == op) {
            Some(entry) => entry.time += time,
            None => times.push(CollectiveHostTime { op, time }),
        }
        result
    }

    /// Computes `x = Σ x` over all ranks.
    pub fn all_reduce(&self, s: &DeviceStream, x: MatMut<'_>) -> Result<(), CollectiveError> {
        let Some(backend) = self.backend.as_deref() else { return Ok(()) };
        self.timed(backend, CollectiveOp::AllReduce, |backend| backend.all_reduce(s, x))
    }

    /// Computes `x = Σ x` over all ranks, or defers the sum to [`ParallelGroup::all_reduce_norm`] if that is
    /// supported for the shape of `x`. The result is the same on all ranks.
    pub fn all_reduce_before_norm(
        &self,
        s: &DeviceStream,
        x: MatMut<'_>,
    ) -> Result<AllReduceState, CollectiveError> {
        if self.fuses_all_reduce_norm(x.rows(), x.cols(), x.dtype()) {
            return Ok(AllReduceState::Deferred);
        }
        self.all_reduce(s, x)?;
        Ok(AllReduceState::Complete)
    }

    /// Whether `all_reduce_norm` supports matrices of this shape.
    #[must_use]
    pub fn fuses_all_reduce_norm(&self, rows: usize, cols: usize, dtype: DType) -> bool {
        self.backend
            .as_ref()
            .is_some_and(|backend| backend.fuses_all_reduce_norm(rows, cols, dtype))
    }

    /// Computes `x += Σ delta` over all ranks, then `y = rms_norm(x)`; see
    /// [`CollectiveBackend::all_reduce_norm`]. [`ParallelGroup::all_reduce_before_norm`] must have deferred the
    /// sum of `delta`.
    ///
    /// Errors: `CollectiveError::Dtype` if the shape is not supported.
    pub fn all_reduce_norm(
        &self,
        s: &DeviceStream,
        args: AllReduceNormArgs<'_>,
    ) -> Result<(), CollectiveError> {
        let Some(backend) = self.backend.as_deref() else {
            let dtype = args.delta.dtype();
            return Err(CollectiveError::Dtype { collective: "all_reduce_norm", dtype });
        };
        self.timed(backend, CollectiveOp::AllReduce, |backend| backend.all_reduce_norm(s, args))
    }

    /// Gathers the columns of all ranks into `all`; see [`CollectiveBackend::all_gather`]. In a group of one
    /// rank, `all` is not written, because `own` contains all columns.
    ///
    /// Errors: `CollectiveError::Shape` if `all` and `own` have different numbers of rows, or if `all` has
    /// more columns than all ranks together.
    pub fn all_gather(
        &self,
        s: &DeviceStream,
        own: MatRef<'_>,
        all: MatMut<'_>,
    ) -> Result<(), CollectiveError> {
        let Some(backend) = self.backend.as_deref() else { return Ok(()) };
        let size = backend.size();
        let reject =
            |what, got| Err(CollectiveError::Shape { collective: "all_gather", what, got, size });
        if all.rows() != own.rows() {
            return reject("rows", all.rows());
        }
        if all.cols() > own.cols() * size {
            return reject("columns", all.cols());
        }
        check_dtypes("all_gather", own.dtype(), all.dtype())?;
        self.timed(backend, CollectiveOp::AllGather, |backend| backend.all_gather(s, own, all))
    }

    /// Gathers the rows of all ranks into `all`; see [`CollectiveBackend::all_gather_rows`]. In a group of
    /// one rank, `all` is not written, because `own` contains all rows.
    ///
    /// Errors: `CollectiveError::Shape` if the number of rows of `all` is not a multiple of the number of
    /// ranks, or if `own` has more rows than `all` has for each rank.
    pub fn all_gather_rows(
        &self,
        s: &DeviceStream,
        own: MatRef<'_>,
        all: MatMut<'_>,
    ) -> Result<(), CollectiveError> {
        let Some(backend) = self.backend.as_deref() else { return Ok(()) };
        check_rows("all_gather_rows", backend.size(), own, all.as_ref())?;
        self.timed(backend, CollectiveOp::AllGatherRows, |backend| {
            backend.all_gather_rows(s, own, all)
        })
    }

    /// Computes this rank's rows of `Σ x` over all ranks; see [`CollectiveBackend::reduce_scatter`]. In a
    /// group of one rank, `own` is not written, because `x` is already the sum.
    ///
    /// Errors: `CollectiveError::Shape` if the number of rows of `x` is not a multiple of the number of
    /// ranks, or if `own` has more rows than `x` has for each rank.
    pub fn reduce_scatter(
        &self,
        s: &DeviceStream,
        x: MatRef<'_>,
        own: MatMut<'_>,
    ) -> Result<(), CollectiveError> {
        let Some(backend) = self.backend.as_deref() else { return Ok(()) };
        check_rows("reduce_scatter", backend.size(), own.as_ref(), x)?;
        self.timed(backend, CollectiveOp::ReduceScatter, |backend| {
            backend.reduce_scatter(s, x, own)
        })
    }

    /// Exchanges the numbers of rows that each rank will send to every rank; see
    /// [`CollectiveBackend::exchange_counts`].
    ///
    /// Errors: `CollectiveError::Shape` if `to` does not have one count per rank.
    pub fn exchange_counts(&self, to: &[usize]) -> Result<AllToAllRowCounts, CollectiveError> {
        let size = self.size();
        if to.len() != size {
            let (collective, what, got) = ("exchange_counts", "number of counts", to.len());
            return Err(CollectiveError::Shape { collective, what, got, size });
        }
        let Some(backend) = self.backend.as_deref() else {
            return Ok(AllToAllRowCounts::new(to.to_vec(), 1));
        };
        self.timed(backend, CollectiveOp::ExchangeCounts, |backend| backend.exchange_counts(to))
    }

    /// Exchanges rows between all ranks; see [`CollectiveBackend::all_to_all`]. In a group of one rank, `y`
    /// is not written, because `x` contains all rows.
    ///
    /// Errors: `CollectiveError::Shape` if this rank's counts do not add up to the number of rows of `x`, or
    /// if `y` has fewer rows than are received.
    pub fn all_to_all(
        &self,
        s: &DeviceStream,
        x: MatRef<'_>,
        y: MatMut<'_>,
        counts: &AllToAllRowCounts,
    ) -> Result<(), CollectiveError> {
        let Some(backend) = self.backend.as_deref() else { return Ok(()) };
        let (size, rank) = (backend.size(), backend.rank());
        let reject =
            |what, got| Err(CollectiveError::Shape { collective: "all_to_all", what, got, size });
        if counts.size() != size {
            return reject("ranks of the counts", counts.size());
        }
        if counts.sent_by(rank) != x.rows() {
            return reject("rows", x.rows());
        }
        if counts.received_by(rank) > y.rows() {
            return reject("rows of the result", y.rows());
        }
        if x.cols() != y.cols() {
            return reject("columns", y.cols());
        }
        check_dtypes("all_to_all", x.dtype(), y.dtype())?;
        self.timed(backend, CollectiveOp::AllToAll, |backend| backend.all_to_all(s, x, y, counts))
    }

    /// Copies the matrix `x` of rank `from` to the matrix `x` of every other rank.
    pub fn broadcast(
        &self,
        s: &DeviceStream,
        x: MatMut<'_>,
        from: usize,
    ) -> Result<(), CollectiveError> {
        let Some(backend) = self.backend.as_deref() else { return Ok(()) };
        self.timed(backend, CollectiveOp::Broadcast(from), |backend| backend.broadcast(s, x, from))
    }

    /// Returns after every rank has called `barrier`.
    pub fn barrier(&self, s: &DeviceStream) -> Result<(), CollectiveError> {
        let Some(backend) = self.backend.as_deref() else { return Ok(()) };
        self.timed(backend, CollectiveOp::Barrier, |backend| backend.barrier(s))
    }
}

/// Checks that `all` has the same number of rows for every rank, that this number is at least the number of
/// rows of `own`, and that `all` and `own` have the same number of columns and the same dtype.
fn check_rows(
    collective: &'static str,
    size: usize,
    own: MatRef<'_>,
    all: MatRef<'_>,
) -> Result<(), CollectiveError> {
    let reject = |what, got| Err(CollectiveError::Shape { collective, what, got, size });
    if !all.rows().is_multiple_of(size) || own.rows() > all.rows() / size {
        return reject("rows", all.rows());
    }
    if all.cols() != own.cols() {
        return reject("columns", all.cols());
    }
    check_dtypes(collective, own.dtype(), all.dtype())
}

/// Checks that the input and the output of a collective have the same element type.
fn check_dtypes(
    collective: &'static str,
    input: DType,
    output: DType,
) -> Result<(), CollectiveError> {
    if input == output {
        return Ok(());
    }
    Err(CollectiveError::DtypeMismatch { collective, input, output })
}

impl std::fmt::Debug for ParallelGroup {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ParallelGroup({} of {})", self.rank(), self.size())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Minimum duration of a call of `MockCollectiveBackend::all_reduce`, so that tests can check measured
    /// times.
    const MIN_DURATION: Duration = Duration::from_millis(2);

    /// Backend of a group of several ranks. Each operation writes a different number to its output, so that a
    /// test can detect which operation was called.
    struct MockCollectiveBackend {
        size: usize,
    }

    impl CollectiveBackend for MockCollectiveBackend {
        fn rank(&self) -> usize {
            self.size - 1
        }
        fn size(&self) -> usize {
            self.size
        }
        fn all_reduce(&self, _: &DeviceStream, mut x: MatMut<'_>) -> Result<(), CollectiveError> {
            std::thread::sleep(MIN_DURATION);
            x.row_mut::<f32>(0)[0] = 1.0;
            Ok(())
        }
        fn all_gather(
            &self,
            _: &DeviceStream,
            _: MatRef<'_>,
            mut all: MatMut<'_>,
        ) -> Result<(), CollectiveError> {
            all.row_mut::<f32>(0)[0] = 2.0;
            Ok(())
        }
        fn all_gather_rows(
            &self,
            _: &DeviceStream,
            _: MatRef<'_>,
            mut all: MatMut<'_>,
        ) -> Result<(), CollectiveError> {
            all.row_mut::<f32>(0)[0] = 4.0;
            Ok(())
        }
        fn reduce_scatter(
            &self,
            _: &DeviceStream,
            _: MatRef<'_>,
            mut own: MatMut<'_>,
        ) -> Result<(), CollectiveError> {
            own.row_mut::<f32>(0)[0] = 5.0;
            Ok(())
        }
        fn exchange_counts(&self, to: &[usize]) -> Result<AllToAllRowCounts, CollectiveError> {
            Ok(AllToAllRowCounts::new([to, to].concat(), 2))
        }
        fn all_to_all(
            &self,
            _: &DeviceStream,
            _: MatRef<'_>,
            mut y: MatMut<'_>,
            _: &AllToAllRowCounts,
        ) -> Result<(), CollectiveError> {
            y.row_mut::<f32>(0)[0] = 6.0;
            Ok(())
        }
        fn broadcast(
            &self,
            _: &DeviceStream,
            mut x: MatMut<'_>,
            from: usize,
        ) -> Result<(), CollectiveError> {
            x.row_mut::<f32>(0)[0] = 3.0;
            if from < self.size { Ok(()) } else { Err(CollectiveError::RankFailed { rank: from }) }
        }
        fn barrier(&self, _: &DeviceStream) -> Result<(), CollectiveError> {
            Err(CollectiveError::RankFailed { rank: 0 })
        }
    }

    fn call_all(group: &ParallelGroup) -> ([f32; 6], Result<(), CollectiveError>) {
        let s = DeviceStream::default();
        let mut x = [[0.0_f32; 4]; 6];
        let view = |x| MatMut::of::<f32>(x, 1, 4).unwrap();
        let (wide, two) = ([0.0_f32; 4], [0.0_f32; 4]);
        let (wide, two) = (MatRef::of(&wide, 1, 4).unwrap(), MatRef::of(&two, 2, 2).unwrap());
        let [a, b, c, d, e, g] = &mut x;
        group.all_reduce(&s, view(a)).unwrap();
        group.all_gather(&s, MatRef::of(&[0.0_f32; 2], 1, 2).unwrap(), view(b)).unwrap();
        group.broadcast(&s, view(c), 0).unwrap();
        let below = MatMut::of::<f32>(d, 2, 2).unwrap();
        group.all_gather_rows(&s, two.rows_from(0, 1), below).unwrap();
        group.reduce_scatter(&s, two, MatMut::of::<f32>(&mut e[..2], 1, 2).unwrap()).unwrap();
        let to = if group.size() == 1 { &[1][..] } else { &[1, 0] };
        let counts = group.exchange_counts(to).unwrap();
        assert_eq!(counts.rows_from(0), to);
        group.all_to_all(&s, wide, view(g), &counts).unwrap();
        (x.map(|x| x[0]), group.barrier(&s))
    }

    #[test]
    fn single_rank_group_does_nothing() {
        for group in [
            ParallelGroup::single(),
            ParallelGroup::new(Box::new(MockCollectiveBackend { size: 1 })),
        ] {
            assert_eq!((group.rank(), group.size()), (0, 1));
            assert_eq!(call_all(&group), ([0.0; 6], Ok(())));
            assert_eq!(group.take_times(), [], "no call is recorded");
        }
    }

    #[test]
    fn call_times_are_summed_by_op_until_taken() {
        let group = ParallelGroup::new(Box::new(MockCollectiveBackend { size: 2 }));
        let s = DeviceStream::default();
        let mut x = [0.0_f32; 4];
        for _ in 0..3 {
            group.all_reduce(&s, MatMut::of(&mut x, 1, 4).unwrap()).unwrap();
        }
        assert!(group.barrier(&s).is_err(), "the time of a failed call is included");
        let times = group.take_times();
        let ops: Vec<CollectiveOp> = times.iter().map(|entry| entry.op).collect();
        assert_eq!(ops, [CollectiveOp::AllReduce, CollectiveOp::Barrier]);
        assert!(times[0].time >= 3 * MIN_DURATION, "{times:?}");
        assert_eq!(group.take_times(), []);
    }

    #[test]
    fn group_of_several_calls_its_backend() {
        let group = ParallelGroup::new(Box::new(MockCollectiveBackend { size: 2 }));
        assert_eq!((group.rank(), group.size()), (1, 2));
        assert_eq!(
            call_all(&group),
            ([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], Err(CollectiveError::RankFailed { rank: 0 }))
        );
        let (own, mut x) = ([0.0_f32; 2], [0.0_f32; 5]);
        let own = MatRef::of(&own, 1, 2).unwrap();
        let wide =
            group.all_gather(&DeviceStream::default(), own, MatMut::of(&mut x, 1, 5).unwrap());
        assert!(matches!(wide, Err(CollectiveError::Shape { got: 5, size: 2, .. })));
        let s = DeviceStream::default();
        let mut y = [0.0_f32; 3];
        let own = MatRef::of(&[0.0_f32; 2], 2, 1).unwrap();
        let rejected = group.all_gather_rows(&s, own, MatMut::of(&mut y, 3, 1).unwrap());
        assert!(matches!(rejected, Err(CollectiveError::Shape { what: "rows", got: 3, .. })));
        let rejected = group.reduce_scatter(&s, own, MatMut::of(&mut y[..2], 2, 1).unwrap());
        assert!(matches!(rejected, Err(CollectiveError::Shape { what: "rows", got: 2, .. })));
        let rejected = group.exchange_counts(&[1]);
        assert!(matches!(
            rejected,
            Err(CollectiveError::Shape { what: "number of counts", got: 1, .. })
        ));
        let counts = group.exchange_counts(&[0, 2]).unwrap();
        let rejected = group.all_to_all(&s, own, MatMut::of(&mut y, 3, 1).unwrap(), &counts);
        let what = "rows of the result";
        assert_eq!(
            rejected,
            Err(CollectiveError::Shape { collective: "all_to_all", what, got: 3, size: 2 })
        );
    }

    #[test]
    fn unequal_dtypes_are_rejected() {
        let group = ParallelGroup::new(Box::new(MockCollectiveBackend { size: 2 }));
        let s = DeviceStream::default();
        let own = MatRef::of(&[0.0_f32; 2], 2, 1).unwrap();
        let mut words = [0_i32; 4];
        let mismatch = |collective| {
            let (input, output) = (DType::F32, DType::I32);
            Err(CollectiveError::DtypeMismatch { collective, input, output })
        };
        let rejected = group.all_gather(&s, own, MatMut::of(&mut words, 2, 2).unwrap());
        assert_eq!(rejected, mismatch("all_gather"));
        let rejected = group.all_gather_rows(&s, own, MatMut::of(&mut words, 4, 1).unwrap());
        assert_eq!(rejected, mismatch("all_gather_rows"));
        let counts = group.exchange_counts(&[0, 2]).unwrap();
        let all = MatMut::of(&mut words, 4, 1).unwrap();
        assert_eq!(group.all_to_all(&s, own, all, &counts), mismatch("all_to_all"));
    }
}

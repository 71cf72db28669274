//! Parallel axis, as one rank of it calls it.

use std::cell::RefCell;
use std::time::{Duration, Instant};

use device::{DType, DeviceStream, MatMut, MatRef};

use crate::{CollectiveCall, CollectiveError, CollectiveOp, LaunchCheckpoint, RowCounts};

/// Transport of the collectives of one parallel axis. All operations run in the order of stream `s`; every
/// rank calls the same operations in the same order with matrices of the same shape.
pub trait CollectiveBackend: Send {
    /// Index of this rank, below `size`.
    fn rank(&self) -> usize;

    /// Number of ranks of the group.
    fn size(&self) -> usize;

    /// Computes `x = Σ x` over the ranks. All ranks add in the same order and get the same bits: in rank
    /// order, except where a GPU's library adds.
    fn all_reduce(&self, s: &DeviceStream, x: MatMut<'_>) -> Result<(), CollectiveError>;

    /// Whether `all_reduce_norm` supports matrices of this shape; the result is the same on all ranks.
    fn fuses_all_reduce_norm(&self, _rows: usize, _cols: usize, _dtype: DType) -> bool {
        false
    }

    /// Computes `x += Σ delta` over the ranks, then `y = rms_norm(x)`, in one launch with the same bits as
    /// two launches.
    fn all_reduce_norm(
        &self,
        _: &DeviceStream,
        args: AllReduceNormArgs<'_>,
    ) -> Result<(), CollectiveError> {
        Err(CollectiveError::Dtype { collective: "all_reduce_norm", dtype: args.delta.dtype() })
    }

    /// `all [n, C]` = columns of `own [n, c]` of all ranks: columns from `r · c` on are those of rank `r`.
    /// Columns beyond `C` are padding and dropped.
    fn all_gather(
        &self,
        s: &DeviceStream,
        own: MatRef<'_>,
        all: MatMut<'_>,
    ) -> Result<(), CollectiveError>;

    /// `all [size · m, C]`: rows from `r · m` on are `own [n, C]` of rank `r`, with `n` up to `m`. The rows
    /// after them are filled with 0; in integers with -1, the null index.
    fn all_gather_rows(
        &self,
        s: &DeviceStream,
        own: MatRef<'_>,
        all: MatMut<'_>,
    ) -> Result<(), CollectiveError>;

    /// `own [n, C]` = the first `n` of this rank's rows of `Σ x` over the ranks, added in rank order; this
    /// rank's rows of `x [size · m, C]` are the `m` rows from `rank · m` on.
    fn reduce_scatter(
        &self,
        s: &DeviceStream,
        x: MatRef<'_>,
        own: MatMut<'_>,
    ) -> Result<(), CollectiveError>;

    /// Sends the number of rows `to[r]` that this rank has for each rank `r`, and returns the counts of all
    /// ranks. The host waits for the counts, so this call cannot be captured.
    fn exchange_counts(&self, to: &[usize]) -> Result<RowCounts, CollectiveError>;

    /// Sends the rows of `x` to the ranks, in rank order, with the number of rows per rank in `counts`. `y`
    /// starts with the received rows, in rank order. All ranks pass the same counts, so this call cannot be
    /// captured.
    fn all_to_all(
        &self,
        s: &DeviceStream,
        x: MatRef<'_>,
        y: MatMut<'_>,
        counts: &RowCounts,
    ) -> Result<(), CollectiveError>;

    /// Copies `x` of rank `from` to all ranks.
    fn broadcast(
        &self,
        s: &DeviceStream,
        x: MatMut<'_>,
        from: usize,
    ) -> Result<(), CollectiveError>;

    /// Returns after every rank has called it.
    fn barrier(&self, s: &DeviceStream) -> Result<(), CollectiveError>;

    /// Starts to record calls that are captured into a graph. A call that completes before it returns cannot
    /// be captured.
    fn begin_capture(&self) {}

    /// Returns the calls recorded since `begin_capture`.
    fn end_capture(&self) -> Vec<CollectiveCall> {
        Vec::new()
    }

    /// Reports the replay of a graph that contains these calls.
    fn on_replayed(&self, _calls: &[CollectiveCall]) -> Result<(), CollectiveError> {
        Ok(())
    }

    /// Checkpoint of all calls launched so far; `None` if calls complete before they return.
    fn launch_checkpoint(&self) -> Option<LaunchCheckpoint> {
        None
    }
}

/// Arguments of a fused all-reduce, residual addition and RMS norm.
#[derive(Debug)]
pub struct AllReduceNormArgs<'a> {
    /// Normed result, `[T, H]`.
    pub y: MatMut<'a>,
    /// Residual stream `[T, H]`, updated in place.
    pub x: MatMut<'a>,
    /// Summand of this rank, `[T, H]`.
    pub delta: MatRef<'a>,
    /// Weight of the norm, `[H]`.
    pub weight: MatRef<'a>,
    /// Added to the mean square.
    pub eps: f32,
}

/// Group of one parallel axis: TP, EP or DP. A group of one rank has no transport and does nothing.
pub struct ParallelGroup {
    backend: Option<Box<dyn CollectiveBackend>>,
    /// Time of each operation since the last [`ParallelGroup::take_times`].
    times: RefCell<Vec<CollectiveTime>>,
}

/// Host time of the calls of one operation, including waits for other ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CollectiveTime {
    /// Operation.
    pub op: CollectiveOp,
    /// Total time until the calls returned.
    pub time: Duration,
}

impl ParallelGroup {
    /// Creates the group of a rank without peers.
    #[must_use]
    pub fn single() -> Self {
        Self { backend: None, times: RefCell::default() }
    }

    /// Creates a group with the transport `backend`.
    #[must_use]
    pub fn new(backend: Box<dyn CollectiveBackend>) -> Self {
        Self { backend: (backend.size() > 1).then_some(backend), times: RefCell::default() }
    }

    /// Index of this rank.
    #[must_use]
    pub fn rank(&self) -> usize {
        self.backend.as_ref().map_or(0, |backend| backend.rank())
    }

    /// Number of ranks of the group, at least 1.
    #[must_use]
    pub fn size(&self) -> usize {
        self.backend.as_ref().map_or(1, |backend| backend.size())
    }

    /// Starts to record calls that are captured into a graph.
    pub fn begin_capture(&self) {
        if let Some(backend) = &self.backend {
            backend.begin_capture();
        }
    }

    /// Returns the calls recorded since `begin_capture`, for [`ParallelGroup::on_replayed`].
    #[must_use]
    pub fn end_capture(&self) -> Vec<CollectiveCall> {
        self.backend.as_ref().map_or_else(Vec::new, |backend| backend.end_capture())
    }

    /// Reports the replay of a graph that contains these calls.
    ///
    /// Errors: the group has failed.
    pub fn on_replayed(&self, calls: &[CollectiveCall]) -> Result<(), CollectiveError> {
        self.backend.as_ref().map_or(Ok(()), |backend| backend.on_replayed(calls))
    }

    /// Checkpoint of all calls launched so far, on devices with asynchronous launches.
    #[must_use]
    pub fn launch_checkpoint(&self) -> Option<LaunchCheckpoint> {
        self.backend.as_ref().and_then(|backend| backend.launch_checkpoint())
    }

    /// Returns the time of calls since the last `take_times`. On a device with asynchronous launches it is
    /// the launch time.
    pub fn take_times(&self) -> Vec<CollectiveTime> {
        self.times.take()
    }

    /// Runs a call and adds its duration to `times`.
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
            None => times.push(CollectiveTime { op, time }),
        }
        result
    }

    /// Computes `x = Σ x` over the ranks.
    pub fn all_reduce(&self, s: &DeviceStream, x: MatMut<'_>) -> Result<(), CollectiveError> {
        let Some(backend) = self.backend.as_deref() else { return Ok(()) };
        self.timed(backend, CollectiveOp::AllReduce, |backend| backend.all_reduce(s, x))
    }

    /// Whether all-reduce, addition to the residual stream and norm are one call: `all_reduce_norm`.
    #[must_use]
    pub fn fuses_all_reduce_norm(&self, rows: usize, cols: usize, dtype: DType) -> bool {
        self.backend
            .as_ref()
            .is_some_and(|backend| backend.fuses_all_reduce_norm(rows, cols, dtype))
    }

    /// Computes `x += Σ delta` over the ranks, then `y = rms_norm(x)`; see
    /// [`CollectiveBackend::all_reduce_norm`]. Only for shapes that [`ParallelGroup::fuses_all_reduce_norm`]
    /// supports.
    ///
    /// Errors: `CollectiveError::Dtype` for other shapes.
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

    /// Gathers the columns of all ranks into `all`; see [`CollectiveBackend::all_gather`]. Without peers,
    /// `own` has all columns and `all` is not written.
    ///
    /// Errors: `CollectiveError::Shape` if `all` has another number of rows, or more columns than all ranks
    /// together.
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
        if all.cols() > own.cols() * size || all.dtype() != own.dtype() {
            return reject("columns", all.cols());
        }
        self.timed(backend, CollectiveOp::AllGather, |backend| backend.all_gather(s, own, all))
    }

    /// Gathers the rows of all ranks into `all`; see [`CollectiveBackend::all_gather_rows`]. Without peers,
    /// `own` has all rows and `all` is not written.
    ///
    /// Errors: `CollectiveError::Shape` if the rows of `all` do not divide among the ranks, or are too few
    /// for `own`.
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

    /// Computes this rank's rows of `Σ x` over the ranks; see [`CollectiveBackend::reduce_scatter`]. Without
    /// peers, `x` has all rows and `own` is not written.
    ///
    /// Errors: `CollectiveError::Shape` if the rows of `x` do not divide among the ranks, or are too few for
    /// `own`.
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

    /// Exchanges the number of rows that each rank has for each rank; see
    /// [`CollectiveBackend::exchange_counts`].
    ///
    /// Errors: `CollectiveError::Shape` if `to` does not have one count per rank.
    pub fn exchange_counts(&self, to: &[usize]) -> Result<RowCounts, CollectiveError> {
        let size = self.size();
        if to.len() != size {
            let (collective, what, got) = ("exchange_counts", "number of counts", to.len());
            return Err(CollectiveError::Shape { collective, what, got, size });
        }
        let Some(backend) = self.backend.as_deref() else {
            return Ok(RowCounts::new(to.to_vec(), 1));
        };
        self.timed(backend, CollectiveOp::ExchangeCounts, |backend| backend.exchange_counts(to))
    }

    /// Exchanges rows between all ranks; see [`CollectiveBackend::all_to_all`]. Without peers, `x` has all
    /// rows and `y` is not written.
    ///
    /// Errors: `CollectiveError::Shape` if this rank's counts do not add up to the rows of `x`, or `y` is too
    /// small.
    pub fn all_to_all(
        &self,
        s: &DeviceStream,
        x: MatRef<'_>,
        y: MatMut<'_>,
        counts: &RowCounts,
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
        if x.cols() != y.cols() || x.dtype() != y.dtype() {
            return reject("columns", y.cols());
        }
        self.timed(backend, CollectiveOp::AllToAll, |backend| backend.all_to_all(s, x, y, counts))
    }

    /// Copies `x` of rank `from` to all ranks.
    pub fn broadcast(
        &self,
        s: &DeviceStream,
        x: MatMut<'_>,
        from: usize,
    ) -> Result<(), CollectiveError> {
        let Some(backend) = self.backend.as_deref() else { return Ok(()) };
        self.timed(backend, CollectiveOp::Broadcast(from), |backend| backend.broadcast(s, x, from))
    }

    /// Returns after every rank has called it.
    pub fn barrier(&self, s: &DeviceStream) -> Result<(), CollectiveError> {
        let Some(backend) = self.backend.as_deref() else { return Ok(()) };
        self.timed(backend, CollectiveOp::Barrier, |backend| backend.barrier(s))
    }
}

/// Checks that the rows of `all` divide among the ranks, and that those of `own` fit into the part of one
/// rank.
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
    if all.cols() != own.cols() || all.dtype() != own.dtype() {
        return reject("columns", all.cols());
    }
    Ok(())
}

impl std::fmt::Debug for ParallelGroup {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ParallelGroup({} of {})", self.rank(), self.size())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Minimum duration of a call of `all_reduce`.
    const MIN_DURATION: Duration = Duration::from_millis(2);

    /// Backend with peers that writes a different value for each operation.
    struct MarkerBackend {
        size: usize,
    }

    impl CollectiveBackend for MarkerBackend {
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
        fn exchange_counts(&self, to: &[usize]) -> Result<RowCounts, CollectiveError> {
            Ok(RowCounts::new([to, to].concat(), 2))
        }
        fn all_to_all(
            &self,
            _: &DeviceStream,
            _: MatRef<'_>,
            mut y: MatMut<'_>,
            _: &RowCounts,
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
        for group in
            [ParallelGroup::single(), ParallelGroup::new(Box::new(MarkerBackend { size: 1 }))]
        {
            assert_eq!((group.rank(), group.size()), (0, 1));
            assert_eq!(call_all(&group), ([0.0; 6], Ok(())));
            assert_eq!(group.take_times(), [], "no call is recorded");
        }
    }

    #[test]
    fn call_times_are_summed_by_op_until_taken() {
        let group = ParallelGroup::new(Box::new(MarkerBackend { size: 2 }));
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
        let group = ParallelGroup::new(Box::new(MarkerBackend { size: 2 }));
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
}

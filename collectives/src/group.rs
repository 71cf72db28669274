//! A parallel axis as one rank sees it.

use std::cell::RefCell;
use std::time::{Duration, Instant};

use device::{DType, DeviceStream, MatMut, MatRef};

use crate::{CollectiveCall, CollectiveError, CollectiveOp, LaunchCheckpoint, RowCounts};

/// How the ranks of one axis combine their matrices. All operations work in the order of `s`; every rank
/// calls the same ones in the same order with matrices of the same shape.
pub trait CollectiveBackend: Send {
    /// This rank, below `size`.
    fn rank(&self) -> usize;

    /// Ranks of the group.
    fn size(&self) -> usize;

    /// `x = Σ x` over the ranks, in an order that is the same for all, so that all hold the same bits: that of ranks, except where a GPU's library
    /// adds.
    fn all_reduce(&self, s: &DeviceStream, x: MatMut<'_>) -> Result<(), CollectiveError>;

    /// Whether `all_reduce_norm` exists for matrices of this shape: the same answer on all ranks.
    fn fuses_all_reduce_norm(&self, _rows: usize, _cols: usize, _dtype: DType) -> bool {
        false
    }

    /// `x += Σ delta` over the ranks, then `y = rms_norm(x)`, in one launch with the results of two: `to` is `y` and
    /// `x [T, H]`, `delta [T, H]`, `norm` a weight `[H]` and ε.
    fn all_reduce_norm(
        &self,
        _: &DeviceStream,
        _to: (MatMut<'_>, MatMut<'_>),
        delta: MatRef<'_>,
        _norm: (MatRef<'_>, f32),
    ) -> Result<(), CollectiveError> {
        Err(CollectiveError::Dtype { collective: "all_reduce_norm", dtype: delta.dtype() })
    }

    /// `all [n, C]` = what the ranks bring, `own [n, c]`, side by side: columns from `r · c` on are those of
    /// rank `r`. What reaches beyond `C` is padding and left out.
    fn all_gather(
        &self,
        s: &DeviceStream,
        own: MatRef<'_>,
        all: MatMut<'_>,
    ) -> Result<(), CollectiveError>;

    /// `all [size · m, C]`: rows from `r · m` on are those of rank `r`, which brings `own [n, C]`, up to `m` of them.
    /// Behind what it brings lie zeros; in integers -1, the index of nothing.
    fn all_gather_rows(
        &self,
        s: &DeviceStream,
        own: MatRef<'_>,
        all: MatMut<'_>,
    ) -> Result<(), CollectiveError>;

    /// `own [n, C] = Σ x` over the ranks, in their order, of the first `n` of those rows of `x [size · m, C]` that are
    /// this rank's: the `m` from `rank · m` on.
    fn reduce_scatter(
        &self,
        s: &DeviceStream,
        x: MatRef<'_>,
        own: MatMut<'_>,
    ) -> Result<(), CollectiveError>;

    /// Tells all ranks that this one has `to[r]` rows for rank `r`, and learns the same of all others. The host waits for them, so this is
    /// never part of a recording.
    fn exchange_counts(&self, to: &[usize]) -> Result<RowCounts, CollectiveError>;

    /// Sends the rows of `x` to the ranks, as many to each as `counts` says, those for rank 0 first. `y` begins with what has come, in the
    /// order of ranks. All ranks bring the same counts, so this is never part of a recording.
    fn all_to_all(
        &self,
        s: &DeviceStream,
        x: MatRef<'_>,
        y: MatMut<'_>,
        counts: &RowCounts,
    ) -> Result<(), CollectiveError>;

    /// `x` becomes what rank `from` brings.
    fn broadcast(
        &self,
        s: &DeviceStream,
        x: MatMut<'_>,
        from: usize,
    ) -> Result<(), CollectiveError>;

    /// Returns once every rank has called it.
    fn barrier(&self, s: &DeviceStream) -> Result<(), CollectiveError>;

    /// Calls from now on are recorded with the launches of a stream. What works before it returns cannot be.
    fn begin_capture(&self) {}

    /// The calls since then.
    fn end_capture(&self) -> Vec<CollectiveCall> {
        Vec::new()
    }

    /// A recording with these calls was launched.
    fn on_replayed(&self, _calls: &[CollectiveCall]) -> Result<(), CollectiveError> {
        Ok(())
    }

    /// What has been launched so far, where calls return before they are done.
    fn launch_checkpoint(&self) -> Option<LaunchCheckpoint> {
        None
    }
}

/// One axis: TP, EP or DP. A group of one has no transport and does nothing.
pub struct ParallelGroup {
    backend: Option<Box<dyn CollectiveBackend>>,
    /// One entry for each operation called since they were taken.
    times: RefCell<Vec<CollectiveTime>>,
}

/// What the calls of one operation took, the wait for the other ranks included.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CollectiveTime {
    /// What was called.
    pub op: CollectiveOp,
    /// How long all calls took until they returned.
    pub time: Duration,
}

impl ParallelGroup {
    /// The group of a rank without peers.
    #[must_use]
    pub fn single() -> Self {
        Self { backend: None, times: RefCell::default() }
    }

    /// A group whose ranks meet through `peers`.
    #[must_use]
    pub fn new(peers: Box<dyn CollectiveBackend>) -> Self {
        Self { backend: (peers.size() > 1).then_some(peers), times: RefCell::default() }
    }

    /// This rank.
    #[must_use]
    pub fn rank(&self) -> usize {
        self.backend.as_ref().map_or(0, |peers| peers.rank())
    }

    /// Ranks of the group, at least 1.
    #[must_use]
    pub fn size(&self) -> usize {
        self.backend.as_ref().map_or(1, |peers| peers.size())
    }

    /// Calls from now on are recorded with the launches of a stream.
    pub fn begin_capture(&self) {
        if let Some(peers) = &self.backend {
            peers.begin_capture();
        }
    }

    /// The calls since then, for [`ParallelGroup::replayed`].
    #[must_use]
    pub fn end_capture(&self) -> Vec<CollectiveCall> {
        self.backend.as_ref().map_or_else(Vec::new, |peers| peers.end_capture())
    }

    /// A recording with these calls was launched.
    ///
    /// Errors: the group has failed.
    pub fn on_replayed(&self, calls: &[CollectiveCall]) -> Result<(), CollectiveError> {
        self.backend.as_ref().map_or(Ok(()), |peers| peers.on_replayed(calls))
    }

    /// What has been launched so far, on devices that work behind calls.
    #[must_use]
    pub fn launch_checkpoint(&self) -> Option<LaunchCheckpoint> {
        self.backend.as_ref().and_then(|peers| peers.launch_checkpoint())
    }

    /// What calls have taken since this was asked last. On a device that works behind calls it is the time to
    /// hand them over.
    pub fn take_times(&self) -> Vec<CollectiveTime> {
        self.times.take()
    }

    /// Makes a call, and notes how long it takes.
    fn timed<T>(
        &self,
        peers: &dyn CollectiveBackend,
        operation: CollectiveOp,
        call: impl FnOnce(&dyn CollectiveBackend) -> Result<T, CollectiveError>,
    ) -> Result<T, CollectiveError> {
        let started = Instant::now();
        let result = call(peers);
        let time = started.elapsed();
        let mut spent = self.times.borrow_mut();
        match spent.iter_mut().find(|spent| spent.op == operation) {
            Some(spent) => spent.time += time,
            None => spent.push(CollectiveTime { op: operation, time }),
        }
        result
    }

    /// `x = Σ x` over the ranks.
    pub fn all_reduce(&self, s: &DeviceStream, x: MatMut<'_>) -> Result<(), CollectiveError> {
        let Some(peers) = self.backend.as_deref() else { return Ok(()) };
        self.timed(peers, CollectiveOp::AllReduce, |peers| peers.all_reduce(s, x))
    }

    /// Whether a sum over the ranks, the sum with the residual stream and its norm are one call: `all_reduce_norm`.
    #[must_use]
    pub fn fuses_all_reduce_norm(&self, rows: usize, cols: usize, dtype: DType) -> bool {
        self.backend.as_ref().is_some_and(|peers| peers.fuses_all_reduce_norm(rows, cols, dtype))
    }

    /// `x += Σ delta` over the ranks, then `y = rms_norm(x)`; see [`CollectiveBackend::all_reduce_norm`]. Asked for where
    /// [`ParallelGroup::fuses_all_reduce_norm`] says so.
    ///
    /// Errors: `CollectiveError::Dtype` where it does not.
    pub fn all_reduce_norm(
        &self,
        s: &DeviceStream,
        to: (MatMut<'_>, MatMut<'_>),
        delta: MatRef<'_>,
        norm: (MatRef<'_>, f32),
    ) -> Result<(), CollectiveError> {
        let Some(peers) = self.backend.as_deref() else {
            let dtype = delta.dtype();
            return Err(CollectiveError::Dtype { collective: "all_reduce_norm", dtype });
        };
        self.timed(peers, CollectiveOp::AllReduce, |peers| {
            peers.all_reduce_norm(s, to, delta, norm)
        })
    }

    /// `all` = what the ranks bring, side by side; see [`CollectiveBackend::all_gather`]. A rank without peers has it all in
    /// `own`, and `all` is left alone.
    ///
    /// Errors: `CollectiveError::Shape` if `all` has other rows, or more columns than the ranks bring.
    pub fn all_gather(
        &self,
        s: &DeviceStream,
        own: MatRef<'_>,
        all: MatMut<'_>,
    ) -> Result<(), CollectiveError> {
        let Some(peers) = self.backend.as_deref() else { return Ok(()) };
        let size = peers.size();
        let refused =
            |what, got| Err(CollectiveError::Shape { collective: "all_gather", what, got, size });
        if all.rows() != own.rows() {
            return refused("rows", all.rows());
        }
        if all.cols() > own.cols() * size || all.dtype() != own.dtype() {
            return refused("columns", all.cols());
        }
        self.timed(peers, CollectiveOp::AllGather, |peers| peers.all_gather(s, own, all))
    }

    /// The rows of all ranks, one below the other; see [`CollectiveBackend::all_gather_rows`]. A rank without peers has them
    /// all in `own`, and `all` is left alone.
    ///
    /// Errors: `CollectiveError::Shape` if `all` has not as many rows for each rank, or fewer than this one brings.
    pub fn all_gather_rows(
        &self,
        s: &DeviceStream,
        own: MatRef<'_>,
        all: MatMut<'_>,
    ) -> Result<(), CollectiveError> {
        let Some(peers) = self.backend.as_deref() else { return Ok(()) };
        check_rows("all_gather_rows", peers.size(), own, all.as_ref())?;
        self.timed(peers, CollectiveOp::AllGatherRows, |peers| peers.all_gather_rows(s, own, all))
    }

    /// This rank's rows of `Σ x` over the ranks; see [`CollectiveBackend::reduce_scatter`]. A rank without peers has them all
    /// in `x`, and `own` is left alone.
    ///
    /// Errors: `CollectiveError::Shape` if `x` has not as many rows for each rank, or fewer than this one wants.
    pub fn reduce_scatter(
        &self,
        s: &DeviceStream,
        x: MatRef<'_>,
        own: MatMut<'_>,
    ) -> Result<(), CollectiveError> {
        let Some(peers) = self.backend.as_deref() else { return Ok(()) };
        check_rows("reduce_scatter", peers.size(), own.as_ref(), x)?;
        self.timed(peers, CollectiveOp::ReduceScatter, |peers| peers.reduce_scatter(s, x, own))
    }

    /// What every rank has for every other one; see [`CollectiveBackend::exchange_counts`].
    ///
    /// Errors: `CollectiveError::Shape` if `to` has not a number for each rank.
    pub fn exchange_counts(&self, to: &[usize]) -> Result<RowCounts, CollectiveError> {
        let size = self.size();
        if to.len() != size {
            let (collective, what, got) = ("exchange_counts", "numbers", to.len());
            return Err(CollectiveError::Shape { collective, what, got, size });
        }
        let Some(peers) = self.backend.as_deref() else {
            return Ok(RowCounts::new(to.to_vec(), 1));
        };
        self.timed(peers, CollectiveOp::ExchangeCounts, |peers| peers.exchange_counts(to))
    }

    /// Rows to ranks, and theirs to this one; see [`CollectiveBackend::all_to_all`]. A rank without peers keeps its rows in
    /// `x`, and `y` is left alone.
    ///
    /// Errors: `CollectiveError::Shape` if this rank's counts do not add up to the rows of `x`, or `y` is too small.
    pub fn all_to_all(
        &self,
        s: &DeviceStream,
        x: MatRef<'_>,
        y: MatMut<'_>,
        counts: &RowCounts,
    ) -> Result<(), CollectiveError> {
        let Some(peers) = self.backend.as_deref() else { return Ok(()) };
        let (size, rank) = (peers.size(), peers.rank());
        let refused =
            |what, got| Err(CollectiveError::Shape { collective: "all_to_all", what, got, size });
        if counts.size() != size {
            return refused("ranks of the counts", counts.size());
        }
        if counts.sent_by(rank) != x.rows() {
            return refused("rows", x.rows());
        }
        if counts.received_by(rank) > y.rows() {
            return refused("rows of the result", y.rows());
        }
        if x.cols() != y.cols() || x.dtype() != y.dtype() {
            return refused("columns", y.cols());
        }
        self.timed(peers, CollectiveOp::AllToAll, |peers| peers.all_to_all(s, x, y, counts))
    }

    /// `x` becomes what rank `from` brings.
    pub fn broadcast(
        &self,
        s: &DeviceStream,
        x: MatMut<'_>,
        from: usize,
    ) -> Result<(), CollectiveError> {
        let Some(peers) = self.backend.as_deref() else { return Ok(()) };
        self.timed(peers, CollectiveOp::Broadcast(from), |peers| peers.broadcast(s, x, from))
    }

    /// Returns once every rank has called it.
    pub fn barrier(&self, s: &DeviceStream) -> Result<(), CollectiveError> {
        let Some(peers) = self.backend.as_deref() else { return Ok(()) };
        self.timed(peers, CollectiveOp::Barrier, |peers| peers.barrier(s))
    }
}

/// Whether `all` has room for as many rows of each rank, and this one's fit into its part.
fn check_rows(
    collective: &'static str,
    size: usize,
    own: MatRef<'_>,
    all: MatRef<'_>,
) -> Result<(), CollectiveError> {
    let refused = |what, got| Err(CollectiveError::Shape { collective, what, got, size });
    if !all.rows().is_multiple_of(size) || own.rows() > all.rows() / size {
        return refused("rows", all.rows());
    }
    if all.cols() != own.cols() || all.dtype() != own.dtype() {
        return refused("columns", all.cols());
    }
    Ok(())
}

impl std::fmt::Debug for ParallelGroup {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Group({} of {})", self.rank(), self.size())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a call of one operation takes at least.
    const SLOW: Duration = Duration::from_millis(2);

    /// Says it has peers and marks what it was called with.
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
            std::thread::sleep(SLOW);
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
            assert_eq!(group.take_times(), [], "nothing was asked of anybody");
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
        assert!(group.barrier(&s).is_err(), "its time counts, too");
        let spent = group.take_times();
        let operations: Vec<CollectiveOp> = spent.iter().map(|spent| spent.op).collect();
        assert_eq!(operations, [CollectiveOp::AllReduce, CollectiveOp::Barrier]);
        assert!(spent[0].time >= 3 * SLOW, "{spent:?}");
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
        let odd = group.all_gather_rows(&s, own, MatMut::of(&mut y, 3, 1).unwrap());
        assert!(matches!(odd, Err(CollectiveError::Shape { what: "rows", got: 3, .. })));
        let few = group.reduce_scatter(&s, own, MatMut::of(&mut y[..2], 2, 1).unwrap());
        assert!(matches!(few, Err(CollectiveError::Shape { what: "rows", got: 2, .. })));
        let few = group.exchange_counts(&[1]);
        assert!(matches!(few, Err(CollectiveError::Shape { what: "numbers", got: 1, .. })));
        let counts = group.exchange_counts(&[0, 2]).unwrap();
        let full = group.all_to_all(&s, own, MatMut::of(&mut y, 3, 1).unwrap(), &counts);
        let what = "rows of the result";
        assert_eq!(
            full,
            Err(CollectiveError::Shape { collective: "all_to_all", what, got: 3, size: 2 })
        );
    }
}

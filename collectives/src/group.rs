//! A parallel axis as one rank sees it.

use crate::CollectiveError;
use kernels::{Mat, MatMut, Stream};

/// How the ranks of one axis combine their matrices. All operations work in the order of `s`; every rank
/// calls the same ones in the same order with matrices of the same shape.
pub trait Collective: Send {
    /// This rank, below `size`.
    fn rank(&self) -> usize;

    /// Ranks of the group.
    fn size(&self) -> usize;

    /// `x = Σ x` over the ranks, added in the order of ranks, so that all hold the same bits.
    fn all_reduce(&self, s: &Stream, x: MatMut<'_>) -> Result<(), CollectiveError>;

    /// `all [n, C]` = what the ranks bring, `own [n, c]`, side by side: columns from `r · c` on are those of
    /// rank `r`. What reaches beyond `C` is padding and left out.
    fn all_gather(&self, s: &Stream, own: Mat<'_>, all: MatMut<'_>) -> Result<(), CollectiveError>;

    /// `x` becomes what rank `from` brings.
    fn broadcast(&self, s: &Stream, x: MatMut<'_>, from: usize) -> Result<(), CollectiveError>;

    /// Returns once every rank has called it.
    fn barrier(&self, s: &Stream) -> Result<(), CollectiveError>;
}

/// One axis: TP, EP or DP. A group of one has no transport and does nothing.
pub struct Group {
    peers: Option<Box<dyn Collective>>,
}

impl Group {
    /// The group of a rank without peers.
    #[must_use]
    pub fn single() -> Self {
        Self { peers: None }
    }

    /// A group whose ranks meet through `peers`.
    #[must_use]
    pub fn new(peers: Box<dyn Collective>) -> Self {
        Self { peers: (peers.size() > 1).then_some(peers) }
    }

    /// This rank.
    #[must_use]
    pub fn rank(&self) -> usize {
        self.peers.as_ref().map_or(0, |peers| peers.rank())
    }

    /// Ranks of the group, at least 1.
    #[must_use]
    pub fn size(&self) -> usize {
        self.peers.as_ref().map_or(1, |peers| peers.size())
    }

    /// `x = Σ x` over the ranks.
    pub fn all_reduce(&self, s: &Stream, x: MatMut<'_>) -> Result<(), CollectiveError> {
        self.peers.as_ref().map_or(Ok(()), |peers| peers.all_reduce(s, x))
    }

    /// `all` = what the ranks bring, side by side; see [`Collective::all_gather`]. A rank without peers has it all in
    /// `own`, and `all` is left alone.
    ///
    /// Errors: `CollectiveError::Shape` if `all` has other rows, or more columns than the ranks bring.
    pub fn all_gather(
        &self,
        s: &Stream,
        own: Mat<'_>,
        all: MatMut<'_>,
    ) -> Result<(), CollectiveError> {
        let Some(peers) = &self.peers else { return Ok(()) };
        let size = peers.size();
        let refused =
            |what, got| Err(CollectiveError::Shape { collective: "all_gather", what, got, size });
        if all.rows() != own.rows() {
            return refused("rows", all.rows());
        }
        if all.cols() > own.cols() * size || all.dtype() != own.dtype() {
            return refused("columns", all.cols());
        }
        peers.all_gather(s, own, all)
    }

    /// `x` becomes what rank `from` brings.
    pub fn broadcast(&self, s: &Stream, x: MatMut<'_>, from: usize) -> Result<(), CollectiveError> {
        self.peers.as_ref().map_or(Ok(()), |peers| peers.broadcast(s, x, from))
    }

    /// Returns once every rank has called it.
    pub fn barrier(&self, s: &Stream) -> Result<(), CollectiveError> {
        self.peers.as_ref().map_or(Ok(()), |peers| peers.barrier(s))
    }
}

impl std::fmt::Debug for Group {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Group({} of {})", self.rank(), self.size())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Says it has peers and marks what it was called with.
    struct Marker {
        size: usize,
    }

    impl Collective for Marker {
        fn rank(&self) -> usize {
            self.size - 1
        }
        fn size(&self) -> usize {
            self.size
        }
        fn all_reduce(&self, _: &Stream, mut x: MatMut<'_>) -> Result<(), CollectiveError> {
            x.row_mut::<f32>(0)[0] = 1.0;
            Ok(())
        }
        fn all_gather(
            &self,
            _: &Stream,
            _: Mat<'_>,
            mut all: MatMut<'_>,
        ) -> Result<(), CollectiveError> {
            all.row_mut::<f32>(0)[0] = 2.0;
            Ok(())
        }
        fn broadcast(
            &self,
            _: &Stream,
            mut x: MatMut<'_>,
            from: usize,
        ) -> Result<(), CollectiveError> {
            x.row_mut::<f32>(0)[0] = 3.0;
            if from < self.size { Ok(()) } else { Err(CollectiveError::Lost { rank: from }) }
        }
        fn barrier(&self, _: &Stream) -> Result<(), CollectiveError> {
            Err(CollectiveError::Lost { rank: 0 })
        }
    }

    fn call(group: &Group) -> ([f32; 3], Result<(), CollectiveError>) {
        let s = Stream::default();
        let mut x = [[0.0_f32; 4]; 3];
        let view = |x| MatMut::of::<f32>(x, 1, 4).unwrap();
        let [a, b, c] = &mut x;
        group.all_reduce(&s, view(a)).unwrap();
        group.all_gather(&s, Mat::of(&[0.0_f32; 2], 1, 2).unwrap(), view(b)).unwrap();
        group.broadcast(&s, view(c), 0).unwrap();
        (x.map(|x| x[0]), group.barrier(&s))
    }

    #[test]
    fn a_group_of_one_does_nothing() {
        for group in [Group::single(), Group::new(Box::new(Marker { size: 1 }))] {
            assert_eq!((group.rank(), group.size()), (0, 1));
            assert_eq!(call(&group), ([0.0; 3], Ok(())));
        }
    }

    #[test]
    fn a_group_of_several_asks_its_peers() {
        let group = Group::new(Box::new(Marker { size: 2 }));
        assert_eq!((group.rank(), group.size()), (1, 2));
        assert_eq!(call(&group), ([1.0, 2.0, 3.0], Err(CollectiveError::Lost { rank: 0 })));
        let (own, mut x) = ([0.0_f32; 2], [0.0_f32; 5]);
        let own = Mat::of(&own, 1, 2).unwrap();
        let wide = group.all_gather(&Stream::default(), own, MatMut::of(&mut x, 1, 5).unwrap());
        assert!(matches!(wide, Err(CollectiveError::Shape { got: 5, size: 2, .. })));
    }
}

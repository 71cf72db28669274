//! Tests of shared memory groups. All ranks get bit-identical results, for any chunking and order of calls.
//! Every rank gets an error after a rank has failed, timed out or called a different collective operation.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]
#![allow(clippy::print_stdout, reason = "benchmarks print their results")]

#[path = "../../tests/support/bounded_child.rs"]
mod bounded_child;
#[path = "../../tests/support/deadlines.rs"]
mod deadlines;

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::{Command, Stdio};
use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};

use bounded_child::{CHILD_TIMEOUT, wait_within};
use collectives::{
    CALL_HISTORY_LEN, CollectiveBackend, CollectiveCallState, CollectiveError, CollectiveOp,
    GroupMembership, HostMesh, MESH_TOKEN_BYTES, MeshEndpoint, MeshListener, SharedMemoryGroup,
    SharedMemoryRendezvous,
};
use deadlines::DeadlineBarrier;
use device::{DeviceElement, DeviceStream, MatMut, MatRef, bf16, f16};
use proptest::prelude::*;

const S: DeviceStream = DeviceStream(0);

/// Runs `work` on every rank of a group, each in a separate thread, and returns the results.
fn ranks<T: Send>(size: usize, work: impl Fn(SharedMemoryGroup) -> T + Sync) -> Vec<T> {
    let rendezvous = SharedMemoryRendezvous::create(&[size]).unwrap();
    let work = &work;
    thread::scope(|scope| {
        let rank = |rank| {
            let own = SharedMemoryRendezvous::open(rendezvous.path(), &[size]).unwrap();
            scope.spawn(move || work(own.join(0, rank).unwrap()))
        };
        let threads: Vec<_> = (0..size).map(rank).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Endpoints of the listeners, by rank.
fn endpoints_of(listeners: &[MeshListener]) -> BTreeMap<usize, MeshEndpoint> {
    listeners.iter().map(|listener| listener.endpoint().clone()).enumerate().collect()
}

/// Runs `work` on every rank of a group of which `per_host` ranks are on each host. A host is a shared memory of its own.
fn ranks_of_hosts<T: Send>(
    size: usize,
    per_host: usize,
    work: impl Fn(SharedMemoryGroup) -> T + Sync,
) -> Vec<T> {
    // The group under test is the second one, so that its index matters.
    let memory = || SharedMemoryRendezvous::create(&[1, size]).unwrap();
    let hosts: Vec<_> = (0..size / per_host).map(|_| memory()).collect();
    let listeners: Vec<_> = (0..size).map(|_| MeshListener::bind("127.0.0.1").unwrap()).collect();
    let endpoints = endpoints_of(&listeners);
    let (work, endpoints, hosts) = (&work, &endpoints, &hosts);
    thread::scope(|scope| {
        let join = |(rank, listener)| {
            scope.spawn(move || {
                let mesh = HostMesh::new(listener, endpoints.clone(), per_host, rank);
                let member = GroupMembership { group: 1, members: (0..size).collect() };
                let host = &hosts[rank / per_host];
                let groups = host.join_across_hosts(&mesh, &[member]).unwrap();
                work(groups.into_iter().next().unwrap())
            })
        };
        let threads: Vec<_> = listeners.into_iter().enumerate().map(join).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Input element of rank `rank`. The magnitudes differ, so that sums depend on the order of the additions.
fn value(rank: usize, i: usize) -> f32 {
    let bits = (rank * 7919 + i * 104_729 + 12_345) % 1000;
    (bits as f32 - 500.0) * 10f32.powi((i + rank) as i32 % 7 - 3)
}

fn values(rank: usize, count: usize) -> Vec<f32> {
    (0..count).map(|i| value(rank, i)).collect()
}

/// Expected sums of the inputs of all ranks, added in rank order.
fn expected_sums(size: usize, count: usize) -> Vec<f32> {
    (0..count).map(|i| (0..size).fold(0.0, |sum, rank| sum + value(rank, i))).collect()
}

fn run_all_reduce(
    group: &SharedMemoryGroup,
    rows: usize,
    cols: usize,
) -> Result<Vec<f32>, CollectiveError> {
    let mut x = values(group.rank(), rows * cols);
    group.all_reduce(&S, MatMut::of(&mut x, rows, cols).unwrap())?;
    Ok(x)
}

/// 16-bit floating-point element type in a test, with conversions from and to f32.
trait HalfTestElement: DeviceElement + PartialEq + std::fmt::Debug {
    fn of(x: f32) -> Self;
    fn value(self) -> f32;
}

impl HalfTestElement for bf16 {
    fn of(x: f32) -> Self {
        Self::from_f32(x)
    }
    fn value(self) -> f32 {
        self.to_f32()
    }
}

impl HalfTestElement for f16 {
    fn of(x: f32) -> Self {
        Self::from_f32(x)
    }
    fn value(self) -> f32 {
        self.to_f32()
    }
}

fn half_values<T: HalfTestElement>(rank: usize, count: usize) -> Vec<T> {
    values(rank, count).into_iter().map(T::of).collect()
}

fn run_half_all_reduce<T: HalfTestElement>(
    group: &SharedMemoryGroup,
    rows: usize,
    cols: usize,
) -> Vec<T> {
    let mut x = half_values::<T>(group.rank(), rows * cols);
    group.all_reduce(&S, MatMut::of(&mut x, rows, cols).unwrap()).unwrap();
    x
}

/// Gathers the columns of all ranks, and returns the first `total` columns.
fn run_all_gather(group: &SharedMemoryGroup, rows: usize, cols: usize, total: usize) -> Vec<f32> {
    let own = values(group.rank(), rows * cols);
    let mut all = vec![f32::NAN; rows * total];
    let (own, to) = (MatRef::of(&own, rows, cols), MatMut::of(&mut all, rows, total));
    group.all_gather(&S, own.unwrap(), to.unwrap()).unwrap();
    all
}

/// Gathers one row of 32-bit words from each rank.
fn gather_words(group: &SharedMemoryGroup, count: usize) -> Vec<i32> {
    let own: Vec<i32> = (0..count).map(|i| test_word(group.rank(), i)).collect();
    let mut all = vec![0; count * group.size()];
    let (own, to) = (MatRef::of(&own, 1, count), MatMut::of(&mut all, 1, count * group.size()));
    group.all_gather(&S, own.unwrap(), to.unwrap()).unwrap();
    all
}

/// Input element of a gather. Small and large integers occur, including integers whose bits are NaN as f32.
fn test_word(rank: usize, i: usize) -> i32 {
    (i as u32).wrapping_mul(2_654_435_761).rotate_left(rank as u32) as i32
}

fn expected_all_gather(rows: usize, cols: usize, total: usize) -> Vec<f32> {
    let at = |r: usize, c: usize| value(c / cols, r * cols + c % cols);
    (0..rows).flat_map(|r| (0..total).map(move |c| at(r, c))).collect()
}

fn run_broadcast(group: &SharedMemoryGroup, rows: usize, cols: usize, from: usize) -> Vec<i32> {
    let mine = |i: usize| (group.rank() * 1_000_000 + i) as i32;
    let mut x: Vec<i32> = (0..rows * cols).map(mine).collect();
    group.broadcast(&S, MatMut::of(&mut x, rows, cols).unwrap(), from).unwrap();
    x
}

/// Number of rows that rank `rank` contributes to a row gather.
fn rows_of_rank(rank: usize, max_rows: usize) -> usize {
    max_rows.saturating_sub(rank * 3 % 5)
}

/// Gathers the rows of all ranks; the ranks have different numbers of rows.
fn gather_rows(group: &SharedMemoryGroup, max_rows: usize, cols: usize) -> Vec<f32> {
    let rows = rows_of_rank(group.rank(), max_rows);
    let own = values(group.rank(), rows * cols);
    let mut all = vec![f32::NAN; group.size() * max_rows * cols];
    let to = MatMut::of(&mut all, group.size() * max_rows, cols).unwrap();
    group.all_gather_rows(&S, MatRef::of(&own, rows, cols).unwrap(), to).unwrap();
    all
}

fn expected_gathered_rows(size: usize, max_rows: usize, cols: usize, padding: f32) -> Vec<f32> {
    let of = |rank: usize| {
        let own_elements = rows_of_rank(rank, max_rows) * cols;
        (0..max_rows * cols).map(move |i| if i < own_elements { value(rank, i) } else { padding })
    };
    (0..size).flat_map(of).collect()
}

/// Gathers rows of integer indices; padding rows contain -1.
fn gather_indices(group: &SharedMemoryGroup, max_rows: usize, cols: usize) -> Vec<i32> {
    let rows = rows_of_rank(group.rank(), max_rows);
    let own: Vec<i32> = (0..rows * cols).map(|i| value(group.rank(), i) as i32).collect();
    let mut all = vec![7; group.size() * max_rows * cols];
    let to = MatMut::of(&mut all, group.size() * max_rows, cols).unwrap();
    group.all_gather_rows(&S, MatRef::of(&own, rows, cols).unwrap(), to).unwrap();
    all
}

/// Runs a reduce-scatter and returns this rank's rows of the sum.
fn run_reduce_scatter(group: &SharedMemoryGroup, max_rows: usize, cols: usize) -> Vec<f32> {
    let rows = rows_of_rank(group.rank(), max_rows);
    let x = values(group.rank(), group.size() * max_rows * cols);
    let mut own = vec![f32::NAN; rows * cols];
    let x = MatRef::of(&x, group.size() * max_rows, cols).unwrap();
    group.reduce_scatter(&S, x, MatMut::of(&mut own, rows, cols).unwrap()).unwrap();
    own
}

fn run_half_reduce_scatter<T: HalfTestElement>(
    group: &SharedMemoryGroup,
    max_rows: usize,
    cols: usize,
) -> Vec<T> {
    let x = half_values::<T>(group.rank(), group.size() * max_rows * cols);
    let mut own = vec![T::of(f32::NAN); max_rows * cols];
    let x = MatRef::of(&x, group.size() * max_rows, cols).unwrap();
    group.reduce_scatter(&S, x, MatMut::of(&mut own, max_rows, cols).unwrap()).unwrap();
    own
}

/// Number of rows that rank `from` sends to rank `to`: 0 for some pairs of ranks, more than a chunk for
/// others.
fn rows_sent(from: usize, to: usize, max_rows: usize) -> usize {
    (from * 2 + to * 5) % 3 * max_rows
}

fn run_all_to_all(
    group: &SharedMemoryGroup,
    max_rows: usize,
    cols: usize,
) -> (Vec<usize>, Vec<f32>) {
    let to: Vec<usize> =
        (0..group.size()).map(|rank| rows_sent(group.rank(), rank, max_rows)).collect();
    let rows = to.iter().sum();
    let x = values(group.rank(), rows * cols);
    let capacity = 2 * max_rows * group.size();
    let mut y = vec![f32::NAN; capacity * cols];
    let x = MatRef::of(&x, rows, cols).unwrap();
    let counts = group.exchange_counts(&to).unwrap();
    group.all_to_all(&S, x, MatMut::of(&mut y, capacity, cols).unwrap(), &counts).unwrap();
    y.truncate(counts.received_by(group.rank()) * cols);
    // The received rows are sent back to their source ranks.
    let (received, mut returned) = (counts.received_by(group.rank()), vec![f32::NAN; rows * cols]);
    let (y_mat, to) =
        (MatRef::of(&y, received, cols).unwrap(), MatMut::of(&mut returned, rows, cols).unwrap());
    group.all_to_all(&S, y_mat, to, &counts.reversed()).unwrap();
    assert_eq!(returned, values(group.rank(), rows * cols), "rows after both exchanges");
    ((0..group.size()).map(|from| counts.rows_from(from)[group.rank()]).collect(), y)
}

fn expected_all_to_all(
    size: usize,
    rank: usize,
    max_rows: usize,
    cols: usize,
) -> (Vec<usize>, Vec<f32>) {
    let from = |from: usize| {
        let first: usize = (0..rank).map(|to| rows_sent(from, to, max_rows)).sum();
        let rows = first..first + rows_sent(from, rank, max_rows);
        (rows.start * cols..rows.end * cols).map(move |i| value(from, i))
    };
    let received = (0..size).map(|from| rows_sent(from, rank, max_rows)).collect();
    (received, (0..size).flat_map(from).collect())
}

/// Runs the collective operations in which the ranks have different rows, and checks the results.
fn check_rows(group: &SharedMemoryGroup, max_rows: usize, cols: usize) {
    let (size, rank, each) = (group.size(), group.rank(), max_rows * cols);
    assert_eq!(
        gather_rows(group, max_rows, cols),
        expected_gathered_rows(size, max_rows, cols, 0.0)
    );
    let indices = expected_gathered_rows(size, max_rows, cols, -1.0).into_iter().map(|x| x as i32);
    assert_eq!(gather_indices(group, max_rows, cols), indices.collect::<Vec<_>>());
    let mut sum = expected_sums(size, size * each)[rank * each..].to_vec();
    sum.truncate(rows_of_rank(rank, max_rows) * cols);
    assert_eq!(run_reduce_scatter(group, max_rows, cols), sum, "{max_rows} x {cols}");
    assert_eq!(
        run_all_to_all(group, max_rows, cols),
        expected_all_to_all(size, rank, max_rows, cols)
    );
}

/// Runs all collective operations on 16-bit elements and checks the results. Reductions add in f32 in rank
/// order and round only the sum; all other operations copy.
fn check_halves<T: HalfTestElement>(group: &SharedMemoryGroup, rows: usize, cols: usize) {
    let (size, rank, count) = (group.size(), group.rank(), rows * cols);
    let sum = |i| T::of((0..size).fold(0.0, |sum, rank| sum + T::of(value(rank, i)).value()));
    let what = format!("{rows} x {cols} {:?}", T::DTYPE);
    let expected: Vec<T> = (0..count).map(sum).collect();
    assert_eq!(run_half_all_reduce::<T>(group, rows, cols), expected, "{what}");
    let expected: Vec<T> = (rank * count..(rank + 1) * count).map(sum).collect();
    assert_eq!(run_half_reduce_scatter::<T>(group, rows, cols), expected, "{what}");
    let own = half_values::<T>(rank, count);
    let own = MatRef::of(&own, rows, cols).unwrap();
    let stacked: Vec<T> = (0..size).flat_map(|rank| half_values::<T>(rank, count)).collect();
    let mut all = vec![T::of(f32::NAN); size * count];
    let to = MatMut::of(&mut all, size * rows, cols).unwrap();
    group.all_gather_rows(&S, own, to).unwrap();
    assert_eq!(all, stacked, "{what}");
    let mut side_by_side = vec![T::of(f32::NAN); size * count];
    group.all_gather(&S, own, MatMut::of(&mut side_by_side, rows, size * cols).unwrap()).unwrap();
    for (r, row) in side_by_side.chunks(size * cols).enumerate() {
        for (rank, part) in row.chunks(cols).enumerate() {
            assert_eq!(part, &stacked[rank * count + r * cols..][..cols], "{what}");
        }
    }
    // All-to-all in which every rank sends all its rows to the next rank.
    let to: Vec<usize> =
        (0..size).map(|to| if to == (rank + 1) % size { rows } else { 0 }).collect();
    let counts = group.exchange_counts(&to).unwrap();
    let mut received = vec![T::of(f32::NAN); count];
    group.all_to_all(&S, own, MatMut::of(&mut received, rows, cols).unwrap(), &counts).unwrap();
    let sender = (rank + size - 1) % size;
    assert_eq!(received, stacked[sender * count..(sender + 1) * count], "{what}");
    let mut shared = half_values::<T>(rank, count);
    group.broadcast(&S, MatMut::of(&mut shared, rows, cols).unwrap(), size - 1).unwrap();
    assert_eq!(shared, stacked[(size - 1) * count..], "{what}");
}

/// Runs all collective operations on matrices of one shape, and checks the results.
fn check_all(group: &SharedMemoryGroup, rows: usize, cols: usize) {
    let (size, count) = (group.size(), rows * cols);
    assert_eq!(
        run_all_reduce(group, rows, cols).unwrap(),
        expected_sums(size, count),
        "{rows} x {cols}"
    );
    check_halves::<bf16>(group, rows, cols);
    check_halves::<f16>(group, rows, cols);
    // First all columns are gathered, then only one column of the last rank; the other columns of the last
    // rank are padding.
    for total in [size * cols, (size - 1) * cols + 1] {
        assert_eq!(
            run_all_gather(group, rows, cols, total),
            expected_all_gather(rows, cols, total)
        );
    }
    let words: Vec<i32> =
        (0..size).flat_map(|r| (0..count).map(move |i| test_word(r, i))).collect();
    assert_eq!(gather_words(group, count), words);
    for from in 0..size {
        let expected: Vec<i32> = (0..count).map(|i| (from * 1_000_000 + i) as i32).collect();
        assert_eq!(run_broadcast(group, rows, cols, from), expected);
    }
    check_rows(group, rows, cols);
    group.barrier(&S).unwrap();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn all_ranks_get_identical_bits(
        size in 1usize..5,
        shapes in prop::collection::vec((1usize..9, 1usize..70), 1..6),
    ) {
        ranks(size, |group| {
            for &(rows, cols) in &shapes {
                check_all(&group, rows, cols);
            }
        });
    }
}

#[test]
fn ranks_of_several_hosts_get_identical_bits() {
    for (size, per_host) in [(2, 1), (4, 2), (4, 1), (6, 2)] {
        ranks_of_hosts(size, per_host, |group| {
            for (rows, cols) in [(1, 1), (3, 70), (9, 7), (2, 70_001)] {
                check_all(&group, rows, cols);
            }
        });
    }
}

#[test]
fn failure_of_a_rank_reaches_all_hosts() {
    let results = ranks_of_hosts(4, 2, |group| {
        group.barrier(&S).unwrap();
        if group.rank() == 2 { Ok(()) } else { group.barrier(&S) }
    });
    let failed = Err(CollectiveError::RankFailed { rank: 2 });
    assert_eq!(results, [failed.clone(), failed.clone(), Ok(()), failed]);
}

#[test]
fn mismatch_between_hosts_fails_all_ranks() {
    let results = ranks_of_hosts(4, 2, |group| {
        if group.rank() == 3 { run_all_reduce(&group, 2, 2).map(drop) } else { group.barrier(&S) }
    });
    assert!(results.iter().all(Result::is_err), "{results:?}");
    let mismatches =
        results.iter().filter(|result| matches!(result, Err(CollectiveError::Mismatch { .. })));
    assert!(mismatches.count() > 0, "{results:?}");
}

#[test]
fn unauthenticated_connections_are_closed_and_delay_nothing() {
    let memory = [(); 2].map(|()| SharedMemoryRendezvous::create(&[2]).unwrap());
    let listeners = [(); 2].map(|()| MeshListener::bind("127.0.0.1").unwrap());
    let endpoints = endpoints_of(&listeners);
    let debug = format!("{:?}", endpoints[&0]);
    assert!(!debug.contains("token"), "{debug}");
    // A connection with the magic and the indices of rank 1, but with another secret, and connections that send nothing or a part.
    let address = &endpoints[&0].address;
    let mut hello = b"HDRM".to_vec();
    hello.extend([0; MESH_TOKEN_BYTES]);
    hello.extend([0, 0, 0, 0, 1, 0, 0, 0]);
    let mut silent: Vec<TcpStream> =
        (0..40).map(|_| TcpStream::connect(address).unwrap()).collect();
    silent[7].write_all(&hello[..20]).unwrap();
    let mut stranger = TcpStream::connect(address).unwrap();
    stranger.write_all(&hello).unwrap();
    let (memory, endpoints, formed) = (&memory, &endpoints, &DeadlineBarrier::new(3));
    let start = Instant::now();
    thread::scope(|scope| {
        for (rank, listener) in listeners.into_iter().enumerate() {
            scope.spawn(move || {
                let mesh = HostMesh::new(listener, endpoints.clone(), 1, rank);
                let member = GroupMembership { group: 0, members: vec![0, 1] };
                let groups = memory[rank].join_across_hosts(&mesh, &[member]).unwrap();
                assert_eq!(run_all_reduce(&groups[0], 3, 5).unwrap(), expected_sums(2, 15));
                groups[0].barrier(&S).unwrap();
                formed.wait();
                formed.wait();
            });
        }
        formed.wait();
        assert!(start.elapsed() < Duration::from_secs(4), "{:?}", start.elapsed());
        stranger.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        let rest = stranger.read(&mut [0; 8]);
        formed.wait();
        let is_reset = |error: &std::io::Error| error.kind() == std::io::ErrorKind::ConnectionReset;
        assert!(matches!(&rest, Ok(0)) || rest.as_ref().is_err_and(is_reset), "{rest:?}");
    });
    drop(silent);
}

#[test]
fn rank_that_cannot_be_reached_is_named() {
    let memory = SharedMemoryRendezvous::create(&[2]).unwrap();
    let error = MeshListener::bind("203.0.113.7").unwrap_err().to_string();
    assert!(error.starts_with("cannot listen at 203.0.113.7 (--node-address"), "{error}");
    let mesh = HostMesh::new(MeshListener::bind("127.0.0.1").unwrap(), BTreeMap::new(), 1, 0);
    let member = GroupMembership { group: 0, members: vec![0, 1] };
    let error = memory.join_across_hosts(&mesh, &[member]).unwrap_err();
    assert_eq!(error, CollectiveError::NoEndpoint { rank: 1 });
}

#[test]
fn matrices_larger_than_a_slot_are_chunked() {
    // A slot has 65,536 words. The test cases have rows longer than a slot, more rows than fit into a slot,
    // rows as long as a slot, and no rows.
    for (rows, cols) in [(2, 70_001), (300, 1_000), (1, 65_536), (0, 8)] {
        ranks(2, |group| {
            let sum = run_all_reduce(&group, rows, cols).unwrap();
            assert!(sum == expected_sums(2, rows * cols), "{rows} x {cols}");
            check_halves::<bf16>(&group, rows, cols);
            check_halves::<f16>(&group, rows, cols);
            let all = run_all_gather(&group, rows, cols, 2 * cols - 3);
            assert!(all == expected_all_gather(rows, cols, 2 * cols - 3), "{rows} x {cols}");
            let words = gather_words(&group, rows * cols);
            assert!(words[rows * cols..].iter().enumerate().all(|(i, &w)| w == test_word(1, i)));
            check_rows(&group, rows, cols);
        });
    }
}

#[test]
#[ignore = "measures times: `just rows`"]
fn all_gather_cost() {
    const ROUNDS: u32 = 300;
    for count in [3, 24, 257, 8 * 257, 75_968, 8 * 75_968] {
        let times = ranks(2, |group| {
            let start = Instant::now();
            (0..ROUNDS).for_each(|_| drop(gather_words(&group, count)));
            start.elapsed() / ROUNDS
        });
        println!("{count:>8} words per rank, two ranks: {:?}", times[0]);
    }
}

/// Runs an all-to-all in which only rank 0 sends rows, to rank 1.
fn one_way_all_to_all(group: &SharedMemoryGroup, cols: usize) -> Result<Vec<f32>, CollectiveError> {
    let rows = 2 * (1 - group.rank());
    let counts = group.exchange_counts(&[0, rows])?;
    let x = values(group.rank(), rows * cols);
    let mut y = vec![f32::NAN; 2 * cols];
    let x = MatRef::of(&x, rows, cols).unwrap();
    group.all_to_all(&S, x, MatMut::of(&mut y, 2, cols).unwrap(), &counts)?;
    Ok(y)
}

#[test]
fn empty_senders_take_part_and_mismatches_are_detected() {
    let found = ranks(2, |group| one_way_all_to_all(&group, 3).unwrap());
    assert!(found[0].iter().all(|x| x.is_nan()), "rank 0 receives nothing");
    assert_eq!(found[1], values(0, 6));
    let found = ranks(2, |group| one_way_all_to_all(&group, 3 + group.rank()));
    let error = found[0].as_ref().unwrap_err().to_string();
    assert_eq!(
        error,
        "rank 1 calls #2 all_to_all of 2 x 4 F32, this rank calls #2 all_to_all of 2 x 3 F32"
    );
    // Rank 0 calls `all_to_all` while rank 1 calls `exchange_counts` again.
    let found = ranks(2, |group| {
        if group.rank() == 0 {
            return one_way_all_to_all(&group, 3);
        }
        group.exchange_counts(&[0, 0])?;
        group.exchange_counts(&[0, 0]).map(|_| Vec::new())
    });
    let error = found[0].as_ref().unwrap_err().to_string();
    let ours = "this rank calls #2 all_to_all of 2 x 3 F32";
    assert_eq!(error, format!("rank 1 calls #2 exchange_counts of 1 x 2 I32, {ours}"));
}

/// Rank 1 leaves after the counts have been exchanged and before the all-to-all. The other ranks must return
/// an error instead of waiting forever.
#[test]
fn rank_leaving_before_all_to_all_fails_the_group() {
    let found = ranks(3, |group| {
        let counts = group.exchange_counts(&[1, 1, 1])?;
        if group.rank() == 1 {
            return Ok(()); // The group is dropped, so the rank leaves it.
        }
        let (x, mut y) = (values(group.rank(), 3), [0.0_f32; 3]);
        group.all_to_all(
            &S,
            MatRef::of(&x, 3, 1).unwrap(),
            MatMut::of(&mut y, 3, 1).unwrap(),
            &counts,
        )
    });
    let failed = Err(CollectiveError::RankFailed { rank: 1 });
    assert_eq!(found, [failed.clone(), Ok(()), failed]);
}

#[test]
fn mismatched_row_counts_are_an_error() {
    let found = ranks(2, |group| {
        let (own, mut all) = ([0.0_f32; 1], [0.0_f32; 4]);
        let rows = 2 + 2 * group.rank();
        let all = MatMut::of(&mut all[..rows], rows, 1).unwrap();
        group.all_gather_rows(&S, MatRef::of(&own, 1, 1).unwrap(), all)
    });
    let error = found[0].as_ref().unwrap_err().to_string();
    let ours = "this rank calls #1 all_gather_rows of 2 x 1 F32";
    assert_eq!(error, format!("rank 1 calls #1 all_gather_rows of 4 x 1 F32, {ours}"));
}

#[test]
fn no_wake_up_is_lost_with_more_ranks_than_cores() {
    const ROUNDS: usize = 3_000;
    let size = 2 * thread::available_parallelism().unwrap().get();
    ranks(size, |group| {
        for round in 0..ROUNDS {
            let mut x = [(round * (group.rank() + 1)) as f32];
            group.all_reduce(&S, MatMut::of(&mut x, 1, 1).unwrap()).unwrap();
            assert_eq!(x[0], (round * size * (size + 1) / 2) as f32);
        }
    });
}

#[test]
fn mismatched_collectives_are_reported() {
    let found = ranks(2, |group| {
        run_all_reduce(&group, 2, 3).unwrap();
        if group.rank() == 0 { run_all_reduce(&group, 4, 5).map(drop) } else { group.barrier(&S) }
    });
    let error = found[0].as_ref().unwrap_err().to_string();
    assert_eq!(error, "rank 1 calls #2 barrier, this rank calls #2 all_reduce of 4 x 5 F32");
    assert!(matches!(found[1], Err(CollectiveError::Mismatch { rank: 0, .. })), "{found:?}");
    let found = ranks(3, |group| run_all_reduce(&group, 1, 4 + group.rank() / 2).map(drop));
    assert!(matches!(found[2], Err(CollectiveError::Mismatch { rank: 0, .. })), "{found:?}");
    assert!(found.iter().all(Result::is_err), "{found:?}");
}

#[test]
fn leaving_rank_fails_the_group() {
    let found = ranks(3, |group| {
        for round in 0..100 {
            if group.rank() == 1 && round == 50 {
                return Ok(());
            }
            run_all_reduce(&group, 1, 100)?;
        }
        Ok(())
    });
    for rank in [0, 2] {
        assert_eq!(found[rank], Err(CollectiveError::RankFailed { rank: 1 }));
    }
}

#[test]
fn killed_process_fails_the_group() {
    let rendezvous = SharedMemoryRendezvous::create(&[2]).unwrap();
    let group = rendezvous.join(0, 0).unwrap();
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "killed_process_child", "--ignored", "--nocapture"])
        .env("HADRON_TEST_RENDEZVOUS", rendezvous.path())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    for _ in 0..200 {
        assert_eq!(run_all_reduce(&group, 3, 5).unwrap(), expected_sums(2, 15));
    }
    let (killed, kill_time) = channel();
    thread::scope(|scope| {
        // The child process is reaped only after the group has detected its exit, so that it is a zombie
        // until then.
        scope.spawn(|| {
            thread::sleep(Duration::from_millis(20));
            child.kill().unwrap();
            killed.send(Instant::now()).unwrap();
        });
        let error = loop {
            if let Err(error) = run_all_reduce(&group, 3, 5) {
                break error;
            }
        };
        let detected = Instant::now();
        assert_eq!(error, CollectiveError::RankFailed { rank: 1 });
        println!(
            "detected {:?} after the kill",
            detected.duration_since(kill_time.recv_timeout(CHILD_TIMEOUT).unwrap())
        );
    });
    wait_within(&mut child, CHILD_TIMEOUT);
}

/// Runs all-reduces until the test kills this process.
#[test]
#[ignore = "child process, started by killed_process_fails_the_group"]
#[expect(clippy::disallowed_methods, reason = "a variable has the path of the shared memory")]
fn killed_process_child() {
    let Some(path) = std::env::var_os("HADRON_TEST_RENDEZVOUS") else { return };
    let group = SharedMemoryRendezvous::open(path.as_ref(), &[2]).unwrap().join(0, 1).unwrap();
    while run_all_reduce(&group, 3, 5).is_ok() {}
}

#[test]
fn aborted_group_releases_its_waiters() {
    let rendezvous = SharedMemoryRendezvous::create(&[2, 2]).unwrap();
    let (first, second) = (rendezvous.join(0, 0).unwrap(), rendezvous.join(1, 1).unwrap());
    thread::scope(|scope| {
        let waiting = scope.spawn(move || first.barrier(&S));
        while rendezvous.call_history(0, 0).is_empty() {
            thread::yield_now();
        }
        rendezvous.abort();
        assert_eq!(waiting.join().unwrap(), Err(CollectiveError::Aborted));
        assert_eq!(second.barrier(&S), Err(CollectiveError::Aborted));
    });
    assert_eq!(rendezvous.call_history(0, 0)[0].state, CollectiveCallState::Failed);
}

#[test]
fn call_history_is_readable_from_outside() {
    let rendezvous = SharedMemoryRendezvous::create(&[2]).unwrap();
    let groups = [0, 1].map(|rank| rendezvous.join(0, rank).unwrap());
    assert!(rendezvous.call_history(0, 0).is_empty());
    thread::scope(|scope| {
        for group in &mut groups.map(Some) {
            let group = group.take().unwrap();
            scope.spawn(move || {
                for _ in 0..CALL_HISTORY_LEN + 5 {
                    group.barrier(&S).unwrap();
                }
                if group.rank() == 0 {
                    assert!(run_all_reduce(&group, 2, 3).is_err());
                }
            });
        }
    });
    let calls = rendezvous.call_history(0, 0);
    assert_eq!((calls.len(), calls[0].sequence), (CALL_HISTORY_LEN, 7));
    let last = calls.last().unwrap();
    let what = (last.sequence as usize, last.op, last.rows, last.cols, last.state);
    assert_eq!(
        what,
        (CALL_HISTORY_LEN + 6, CollectiveOp::AllReduce, 2, 3, CollectiveCallState::Failed)
    );
    assert_eq!(rendezvous.call_history(0, 1).last().unwrap().state, CollectiveCallState::Done);
}

#[test]
fn ranks_and_shared_memory_files_are_validated() {
    let rendezvous = SharedMemoryRendezvous::create(&[2]).unwrap();
    let _rank = rendezvous.join(0, 1).unwrap();
    assert_eq!(rendezvous.join(0, 1).unwrap_err(), CollectiveError::RankTaken { rank: 1 });
    let larger = SharedMemoryRendezvous::open(rendezvous.path(), &[3]).unwrap_err().to_string();
    assert!(larger.contains("are required"), "{larger}");
    let smaller = SharedMemoryRendezvous::open(rendezvous.path(), &[1]).unwrap_err().to_string();
    assert!(smaller.contains("not the shared memory of groups of [1] ranks"), "{smaller}");
    let missing = SharedMemoryRendezvous::open("/nowhere".as_ref(), &[2]).unwrap_err();
    assert!(matches!(missing, CollectiveError::SharedMemory { .. }), "{missing}");
}

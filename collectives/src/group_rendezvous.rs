//! Rendezvous of the ranks of a group: how they exchange small messages while the group is formed, and whether they are
//! alive.
//!
//! [`SharedMemoryGroup`] is the form for processes of one host. A foreign host (an inference server that runs the ranks)
//! implements the trait by its own communication; its ranks then share memory through [`form_host_group`].

use std::path::PathBuf;

use device::{DeviceStream, MatMut, MatRef};

use crate::{CollectiveBackend, CollectiveError, SharedMemoryGroup, SharedMemoryRendezvous};

/// Bytes of the message with the path of shared memory.
const PATH_BYTES: usize = 64;

/// Communication between the ranks of one group on the host, in addition to the collective operations of devices. All
/// ranks make the same calls in the same order.
pub trait GroupRendezvous {
    /// Index of this rank in the group, below `size`.
    fn rank(&self) -> usize;

    /// Number of ranks of the group.
    fn size(&self) -> usize;

    /// Sends `own` to all ranks, and returns the messages of all ranks in rank order. All messages have the same length.
    ///
    /// Errors: a rank has failed, or the transport fails.
    fn exchange(&self, own: &[u8]) -> Result<Vec<Vec<u8>>, CollectiveError>;

    /// Returns after every rank of the group has called `barrier`.
    ///
    /// Errors: those of [`GroupRendezvous::exchange`].
    fn barrier(&self) -> Result<(), CollectiveError> {
        self.exchange(&[0]).map(drop)
    }

    /// Checks whether all ranks are alive; does not wait.
    ///
    /// Errors: a rank has failed.
    fn check_health(&self) -> Result<(), CollectiveError>;
}

impl GroupRendezvous for SharedMemoryGroup {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.layout.size
    }

    fn exchange(&self, own: &[u8]) -> Result<Vec<Vec<u8>>, CollectiveError> {
        let mut padded = own.to_vec();
        padded.resize(own.len().next_multiple_of(4), 0);
        let words: Vec<i32> =
            padded.as_chunks().0.iter().map(|word| i32::from_le_bytes(*word)).collect();
        let mut all = vec![0; self.layout.size * words.len()];
        let (s, cols) = (DeviceStream::default(), all.len());
        let own_row = MatRef::of(&words, 1, words.len())?;
        self.all_gather(&s, own_row, MatMut::of(&mut all, 1, cols)?)?;
        let message = |words: &[i32]| {
            let bytes = words.iter().flat_map(|word| word.to_le_bytes());
            bytes.take(own.len()).collect()
        };
        Ok(all.chunks(words.len().max(1)).map(message).collect())
    }

    fn barrier(&self) -> Result<(), CollectiveError> {
        CollectiveBackend::barrier(self, &DeviceStream::default())
    }

    fn check_health(&self) -> Result<(), CollectiveError> {
        self.health().check_peers()
    }
}

/// Exchanges 32-bit words: returns the words of all ranks, in rank order. All ranks pass the same number of words.
pub(crate) fn exchange_words(
    rendezvous: &dyn GroupRendezvous,
    own: &[i32],
) -> Result<Vec<i32>, CollectiveError> {
    let message: Vec<u8> = own.iter().flat_map(|word| word.to_le_bytes()).collect();
    let messages = rendezvous.exchange(&message)?;
    let words = messages.iter().flat_map(|bytes| bytes.as_chunks().0.iter());
    Ok(words.map(|word| i32::from_le_bytes(*word)).collect())
}

/// Shared memory of the ranks of one host, and the membership of this rank.
#[derive(Debug)]
pub struct HostGroup {
    /// Membership of this rank, which owns no other resource.
    pub group: SharedMemoryGroup,
    /// The shared memory. The other ranks open it by the file of rank 0, so it must not be dropped before they have.
    pub memory: SharedMemoryRendezvous,
}

/// Forms the shared memory group of the ranks of `rendezvous`, all of which are processes of one host: rank 0 creates the
/// memory, and the other ranks open it at the path that rank 0 sends them.
///
/// Errors: the exchange fails, or a rank cannot create, open or join the memory; then all ranks return an error.
pub fn form_host_group(rendezvous: &dyn GroupRendezvous) -> Result<HostGroup, CollectiveError> {
    let sizes = [rendezvous.size()];
    let rank = rendezvous.rank();
    let created = (rank == 0).then(|| SharedMemoryRendezvous::create(&sizes));
    let mut message = match &created {
        Some(Ok(memory)) => memory.path().as_os_str().as_encoded_bytes().to_vec(),
        _ => Vec::new(), // An empty path: the other ranks fail as well.
    };
    message.resize(PATH_BYTES, 0);
    let messages = rendezvous.exchange(&message)?;
    let memory =
        created.unwrap_or_else(|| SharedMemoryRendezvous::open(&path_in(&messages[0]), &sizes));
    let joined = memory.and_then(|memory| Ok(HostGroup { group: memory.join(0, rank)?, memory }));
    // Every rank has opened the memory, or all ranks fail.
    let joined_ranks = rendezvous.exchange(&[u8::from(joined.is_ok())])?;
    match joined_ranks.iter().position(|joined| joined != &[1]) {
        Some(rank) => Err(joined.err().unwrap_or(CollectiveError::RankFailed { rank })),
        None => joined,
    }
}

/// Path in a message of `PATH_BYTES` bytes.
fn path_in(message: &[u8]) -> PathBuf {
    let text = message.split(|&byte| byte == 0).next().unwrap_or_default();
    PathBuf::from(String::from_utf8_lossy(text).into_owned())
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]
mod tests {
    use super::*;
    use std::thread;

    #[test]
    fn messages_of_any_length_arrive_in_rank_order() {
        let memory = SharedMemoryRendezvous::create(&[3]).unwrap();
        let exchange = |rank: usize| {
            let group = memory.join(0, rank).unwrap();
            let message = |len: usize| vec![b'a' + rank as u8; len];
            let received: Vec<_> =
                [1, 4, 7, 300].map(|len| group.exchange(&message(len)).unwrap()).into();
            group.check_health().unwrap();
            GroupRendezvous::barrier(&group).unwrap();
            received
        };
        let exchange = &exchange;
        thread::scope(|scope| {
            let ranks: Vec<_> = (0..3).map(|rank| scope.spawn(move || exchange(rank))).collect();
            for rank in ranks {
                let received = rank.join().unwrap();
                let expected = [1, 4, 7, 300]
                    .map(|len| vec![vec![b'a'; len], vec![b'b'; len], vec![b'c'; len]]);
                assert_eq!(received, expected);
            }
        });
    }

    #[test]
    fn ranks_of_one_host_meet_through_any_rendezvous() {
        let memory = SharedMemoryRendezvous::create(&[2]).unwrap();
        let meet = |rank: usize| {
            let host = form_host_group(&memory.join(0, rank).unwrap()).unwrap();
            let mut x = [1.5f32 + rank as f32];
            let sum = MatMut::of(&mut x, 1, 1).unwrap();
            host.group.all_reduce(&DeviceStream::default(), sum).unwrap();
            host.group.exchange(&[0]).unwrap(); // No rank leaves before the other has its sum.
            x[0]
        };
        let meet = &meet;
        thread::scope(|scope| {
            let ranks: Vec<_> = (0..2).map(|rank| scope.spawn(move || meet(rank))).collect();
            let sums: Vec<f32> = ranks.into_iter().map(|rank| rank.join().unwrap()).collect();
            assert_eq!(sums, [4.0, 4.0]);
        });
    }

    /// Rendezvous whose messages are those of a list.
    struct ScriptedRendezvous {
        rank: usize,
        messages: [Vec<u8>; 2],
    }

    impl GroupRendezvous for ScriptedRendezvous {
        fn rank(&self) -> usize {
            self.rank
        }

        fn size(&self) -> usize {
            2
        }

        fn exchange(&self, own: &[u8]) -> Result<Vec<Vec<u8>>, CollectiveError> {
            let other = &self.messages[usize::from(own.len() == 1)];
            Ok(if self.rank == 0 {
                vec![own.to_vec(), other.clone()]
            } else {
                vec![other.clone(), own.to_vec()]
            })
        }

        fn check_health(&self) -> Result<(), CollectiveError> {
            Ok(())
        }
    }

    #[test]
    fn all_ranks_fail_if_one_cannot_join() {
        let messages = [vec![0; PATH_BYTES], vec![0]];
        let error = form_host_group(&ScriptedRendezvous { rank: 0, messages: messages.clone() });
        assert_eq!(error.err(), Some(CollectiveError::RankFailed { rank: 1 }));
        let error = form_host_group(&ScriptedRendezvous { rank: 1, messages }).err().unwrap();
        assert!(matches!(error, CollectiveError::SharedMemory { .. }), "{error}");
    }

    #[test]
    fn failed_rank_is_unhealthy() {
        let memory = SharedMemoryRendezvous::create(&[2]).unwrap();
        let group = memory.join(0, 0).unwrap();
        drop(memory.join(0, 1).unwrap());
        assert_eq!(group.check_health(), Err(CollectiveError::RankFailed { rank: 1 }));
    }
}

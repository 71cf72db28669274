//! Ranks of a server on several hosts, and the connections between the members of their groups.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use crate::mesh_endpoint::{ExpectedPeer, MeshEndpoint, MeshListener, connect};
use crate::tcp_mesh::{MirroredRank, ReceivingRank, TcpMesh};
use crate::{CollectiveError, SharedMemoryGroup, SharedMemoryRendezvous};

/// Endpoints of all ranks of a server. Equally many consecutive ranks are on each host.
#[derive(Debug)]
pub struct HostMesh {
    listener: MeshListener,
    endpoints: BTreeMap<usize, MeshEndpoint>,
    ranks_per_host: usize,
    rank: usize,
}

/// Membership of a rank in a group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupMembership {
    /// Index of the group in the shared memory.
    pub group: usize,
    /// World ranks of the members, in the order of their ranks in the group.
    pub members: Vec<usize>,
}

impl HostMesh {
    /// Creates the mesh of rank `rank`, whose listener is `listener`. `endpoints` are those of all ranks of its groups, by world
    /// rank.
    #[must_use]
    pub fn new(
        listener: MeshListener,
        endpoints: BTreeMap<usize, MeshEndpoint>,
        ranks_per_host: usize,
        rank: usize,
    ) -> Self {
        Self { listener, endpoints, ranks_per_host, rank }
    }

    fn host_of(&self, rank: usize) -> usize {
        rank / self.ranks_per_host
    }

    /// Index of the member on host `host` that receives the chunks of the member with index `sender`.
    fn receiver(&self, members: &[usize], host: usize, sender: usize) -> Option<usize> {
        let is_on_host = |&index: &usize| self.host_of(members[index]) == host;
        let on_host: Vec<usize> = (0..members.len()).filter(is_on_host).collect();
        (!on_host.is_empty()).then(|| on_host[sender % on_host.len()])
    }

    /// Connects to the ranks that receive the chunks of this rank, one on each other host of the group.
    fn connect_to_hosts(
        &self,
        membership: &GroupMembership,
        own: usize,
    ) -> Result<Vec<ReceivingRank>, CollectiveError> {
        let GroupMembership { group, members } = membership;
        let mut hosts: Vec<usize> = members.iter().map(|&member| self.host_of(member)).collect();
        hosts.sort_unstable();
        hosts.dedup();
        let others = hosts.into_iter().filter(|&host| host != self.host_of(self.rank));
        let receivers = others.filter_map(|host| self.receiver(members, host, own));
        let sender = ExpectedPeer { group: *group, rank: own, world_rank: self.rank };
        let connect_to = |rank: usize| {
            let world_rank = members[rank];
            let unknown = CollectiveError::NoEndpoint { rank: world_rank };
            let endpoint = self.endpoints.get(&world_rank).ok_or(unknown)?;
            Ok(ReceivingRank { rank, stream: connect(endpoint, world_rank, sender)? })
        };
        receivers.map(connect_to).collect()
    }

    /// Members of a group whose chunks this rank receives for its host.
    fn received_members(&self, membership: &GroupMembership) -> Vec<ExpectedPeer> {
        let (host, members) = (self.host_of(self.rank), &membership.members);
        let is_received = |index: &usize| {
            let receiver = self.receiver(members, host, *index);
            self.host_of(members[*index]) != host
                && receiver.is_some_and(|receiver| members[receiver] == self.rank)
        };
        let group = membership.group;
        let received = (0..members.len()).filter(is_received);
        received.map(|rank| ExpectedPeer { group, rank, world_rank: members[rank] }).collect()
    }
}

impl SharedMemoryRendezvous {
    /// Joins groups whose members may be on several hosts. All members call this with their own rendezvous, whose groups have the
    /// same sizes on all hosts.
    ///
    /// Errors: a rank has been joined before, or a member on another host is unreachable.
    ///
    /// # Panics
    /// Panics if this rank is not a member of a group, or if a group is out of range.
    pub fn join_across_hosts(
        &self,
        mesh: &HostMesh,
        memberships: &[GroupMembership],
    ) -> Result<Vec<SharedMemoryGroup>, CollectiveError> {
        let own_index = |membership: &GroupMembership| {
            let own = membership.members.iter().position(|&member| member == mesh.rank);
            own.expect("this rank is a member of its groups")
        };
        let expected: Vec<ExpectedPeer> =
            memberships.iter().flat_map(|membership| mesh.received_members(membership)).collect();
        let connect = |membership| mesh.connect_to_hosts(membership, own_index(membership));
        let is_cancelled = AtomicBool::new(false);
        // Every rank accepts while it connects, because a connection is complete when the other rank has accepted it.
        let (receivers, accepted) = thread::scope(|scope| {
            let accepting = scope.spawn(|| mesh.listener.accept(expected, &is_cancelled));
            let receivers = memberships.iter().map(connect).collect::<Result<Vec<_>, _>>();
            is_cancelled.store(receivers.is_err(), Ordering::Relaxed);
            (receivers, accepting.join())
        });
        let receivers = receivers?;
        let mut accepted = accepted.unwrap_or(Err(CollectiveError::Aborted))?;
        let join = |(membership, receivers): (&GroupMembership, Vec<ReceivingRank>)| {
            let group = membership.group;
            let mirrored = accepted.extract_if(.., |rank| rank.group == group);
            self.join_with_links(group, own_index(membership), receivers, mirrored.collect())
        };
        memberships.iter().zip(receivers).map(join).collect()
    }

    fn join_with_links(
        &self,
        group: usize,
        rank: usize,
        receivers: Vec<ReceivingRank>,
        mirrored: Vec<MirroredRank>,
    ) -> Result<SharedMemoryGroup, CollectiveError> {
        if receivers.is_empty() {
            return self.join(group, rank);
        }
        let (memory, layout) = self.memory_of(group);
        let mesh = TcpMesh::start(rank, receivers, mirrored, memory, layout)
            .map_err(|error| CollectiveError::LinkFailed { rank, error: error.to_string() })?;
        SharedMemoryGroup::join(memory.clone(), layout, rank, Some(mesh))
    }
}

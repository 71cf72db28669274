//! Ranks of a server on several hosts, and the connections between the members of their groups.

use std::collections::BTreeMap;
use std::net::TcpStream;

use crate::mesh_endpoint::{ExpectedPeer, MeshEndpoint, MeshListener, connect};
use crate::tcp_mesh::{MirroredRank, TcpMesh};
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

    /// World rank of the member on host `host` that copies the chunks of the member with index `sender`.
    fn copier(&self, members: &[usize], host: usize, sender: usize) -> Option<usize> {
        let on_host: Vec<usize> =
            members.iter().copied().filter(|&member| self.host_of(member) == host).collect();
        (!on_host.is_empty()).then(|| on_host[sender % on_host.len()])
    }

    /// Connects to the ranks that copy the chunks of this rank, one on each other host of the group.
    fn connect_to_hosts(
        &self,
        membership: &GroupMembership,
        own: usize,
    ) -> Result<Vec<TcpStream>, CollectiveError> {
        let GroupMembership { group, members } = membership;
        let mut hosts: Vec<usize> = members.iter().map(|&member| self.host_of(member)).collect();
        hosts.sort_unstable();
        hosts.dedup();
        let others = hosts.into_iter().filter(|&host| host != self.host_of(self.rank));
        let copiers = others.filter_map(|host| self.copier(members, host, own));
        let sender = ExpectedPeer { group: *group, rank: own };
        let connect_to = |rank| {
            let endpoint = self.endpoints.get(&rank).ok_or(CollectiveError::NoEndpoint { rank })?;
            connect(endpoint, rank, sender)
        };
        copiers.map(connect_to).collect()
    }

    /// Members of a group whose chunks this rank copies.
    fn copied_members(&self, membership: &GroupMembership) -> Vec<ExpectedPeer> {
        let host = self.host_of(self.rank);
        let is_copied = |index: &usize| {
            let members = &membership.members;
            self.host_of(members[*index]) != host
                && self.copier(members, host, *index) == Some(self.rank)
        };
        let group = membership.group;
        let copied = (0..membership.members.len()).filter(is_copied);
        copied.map(|rank| ExpectedPeer { group, rank }).collect()
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
        // Connections wait in the backlog of a listener until its rank accepts them, so every rank connects first.
        let connect = |membership| mesh.connect_to_hosts(membership, own_index(membership));
        let senders = memberships.iter().map(connect).collect::<Result<Vec<_>, _>>()?;
        let expected = memberships.iter().flat_map(|membership| mesh.copied_members(membership));
        let mut accepted = mesh.listener.accept(expected.collect())?;
        let join = |(membership, senders): (&GroupMembership, Vec<TcpStream>)| {
            let group = membership.group;
            let mirrored = accepted.extract_if(.., |rank| rank.group == group);
            self.join_with_links(group, own_index(membership), senders, mirrored.collect())
        };
        memberships.iter().zip(senders).map(join).collect()
    }

    fn join_with_links(
        &self,
        group: usize,
        rank: usize,
        senders: Vec<TcpStream>,
        mirrored: Vec<MirroredRank>,
    ) -> Result<SharedMemoryGroup, CollectiveError> {
        if senders.is_empty() {
            return self.join(group, rank);
        }
        let (memory, layout) = self.memory_of(group);
        let mesh = TcpMesh::start(rank, senders, mirrored, memory, layout)
            .map_err(|error| CollectiveError::LinkFailed { error: error.to_string() })?;
        SharedMemoryGroup::join(memory.clone(), layout, rank, Some(mesh))
    }
}

//! Starts in virtual time: fake executors send messages of a script.

use super::*;

/// A message of a fake executor, with the time since the start at which the engine receives it.
pub(super) struct ScheduledMessage {
    pub(super) at: Duration,
    pub(super) message: ExecutorEvent,
}

/// A message that is due, and the index of its executor.
pub(super) struct DueMessage {
    pub(super) index: usize,
    pub(super) scheduled: ScheduledMessage,
}

/// Messages of a fake executor in virtual time. After the last one, it answers a request to allocate the KV
/// cache immediately, and sends nothing else.
pub(super) type ExecutorScript = Vec<ScheduledMessage>;

/// A start in virtual time: a barrier, and the scripts and links of its executors.
pub(super) struct VirtualStart {
    pub(super) barrier: StartupBarrier,
    pub(super) scripts: Vec<VecDeque<ScheduledMessage>>,
    pub(super) peers: Vec<FakeExecutorLink>,
}

impl VirtualStart {
    pub(super) fn new(scripts: Vec<ExecutorScript>, start: Instant) -> Self {
        let (links, peers): (Vec<_>, Vec<_>) =
            (0..).map(link).take(scripts.len()).map(|ends| (ends.engine, ends.executor)).unzip();
        let several = links.len() > 1;
        let commands = links.iter().map(|link| link.commands.clone()).collect();
        let state =
            |link: &ExecutorLink| ExecutorStartState::new(&link.receivers[0], several, start);
        let ranks = links.iter().map(state).collect();
        let barrier = StartupBarrier::new(params(), commands, ranks, start);
        Self { barrier, scripts: scripts.into_iter().map(VecDeque::from).collect(), peers }
    }

    /// Removes the message of the scripts that is the next one until `until`.
    fn next_message(&mut self, until: Duration) -> Option<DueMessage> {
        let due = self.scripts.iter().enumerate();
        let due = due.filter_map(|(index, script)| Some((script.front()?.at, index))).min();
        let (_, index) = due.filter(|(at, _)| *at <= until)?;
        Some(DueMessage { index, scheduled: self.scripts[index].pop_front()? })
    }

    /// Lets executors answer requests to allocate the KV cache at the time `at`.
    fn answer_requests(&mut self, at: Duration) {
        for (peer, script) in self.peers.iter_mut().zip(&mut self.scripts) {
            if let Ok(Some(ExecutorCommand::AllocateKv { blocks })) = peer.recv(Duration::ZERO) {
                script.push_back(ScheduledMessage { at, message: ready(blocks) });
            }
        }
    }

    /// Runs the start that began at `start` to its end.
    pub(super) fn run(mut self, start: Instant) -> Result<StartupReport, StartError> {
        let mut elapsed = Duration::ZERO;
        loop {
            self.barrier.check_timeouts(start + elapsed)?;
            let Some(DueMessage { index, scheduled }) = self.next_message(elapsed + POLL) else {
                elapsed += POLL;
                continue;
            };
            elapsed = elapsed.max(scheduled.at);
            let (message, now) = (Ok(scheduled.message), start + elapsed);
            let size = |blocks: u32| blocks.min(50);
            if let Some(report) =
                self.barrier.receive(index, message, now, &size, &mut |_, _, _| {})?
            {
                return Ok(report);
            }
            self.answer_requests(elapsed);
        }
    }
}

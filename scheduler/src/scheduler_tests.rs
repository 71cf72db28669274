//! Tests that `Scheduler::check` and the check that runs when the scheduler becomes idle detect inconsistent
//! state. The simulator relies on both checks.

use super::*;
use crate::{ExecutorFailure, RequestSubmission};
use kvcache::{BlockTables, KvConfig, TableEntries};
use protocol::{KvGroup, KvKind, KvSpec, SequenceSlot};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Returns a scheduler with one sequence slot: one request runs with its first step in flight, another one
/// waits.
fn scheduler() -> Scheduler {
    let group = KvGroup { layers: vec![0], kind: KvKind::Full, bytes_per_block: 1 };
    let spec = KvSpec { block_tokens: 4, groups: vec![group] };
    let limits = SchedulerLimits { max_num_seqs: 1, ..SchedulerLimits::cpu(32, 100) };
    let config = SchedulerConfig::new(limits, KvConfig::new(spec, 16, [1, 2]));
    let hasher = config.kv.block_hasher();
    let mut scheduler = Scheduler::new(config).unwrap();
    let submit = |id| {
        SchedulerEvent::Submit(Box::new(RequestSubmission::greedy(id, (0..9).collect(), &hasher)))
    };
    scheduler.tick(0, &mut vec![submit(1), submit(2)], &mut Vec::new());
    scheduler
}

/// Returns the panic message of `f`, if it panics.
fn panic_of(f: impl FnOnce()) -> Option<String> {
    let payload = catch_unwind(AssertUnwindSafe(f)).err()?;
    let text = payload.downcast_ref::<&str>().map(|&text| text.to_owned());
    text.or_else(|| payload.downcast_ref().cloned())
}

fn running(scheduler: &mut Scheduler) -> &mut Request {
    let state = &mut scheduler.replicas[0].state;
    let slot = state.running.get(0);
    &mut state.requests[slot]
}

fn waiting(scheduler: &mut Scheduler) -> &mut Request {
    let state = &mut scheduler.replicas[0].state;
    let slot = state.waiting.get(0);
    &mut state.requests[slot]
}

#[test]
fn check_detects_inconsistent_counters() {
    assert_eq!(panic_of(|| scheduler().check()), None);
    /// Function that makes the state of a scheduler inconsistent.
    type StateCorruptionFn = fn(&mut Scheduler);
    let cases: [(&str, StateCorruptionFn); 9] = [
        ("reference counts differ", |scheduler| {
            scheduler.replicas[0].kv.grow(&mut BlockTables::default(), TableEntries::all(1));
        }),
        ("reserved blocks are not free", |scheduler| {
            scheduler.replicas[0].state.reserved_blocks = 100;
        }),
        ("reserved blocks miscounted", |scheduler| scheduler.replicas[0].state.reserved_blocks = 1),
        ("waiting tokens miscounted", |scheduler| scheduler.replicas[0].state.waiting_tokens += 1),
        ("a waiting request holds", |scheduler| {
            waiting(scheduler).seq_slot = Some(SequenceSlot(0));
        }),
        ("rows in flight of", |scheduler| running(scheduler).rows_in_flight += 1),
        ("blocks of", |scheduler| running(scheduler).block_count += 1),
        ("load of replica 0 miscounted", |scheduler| scheduler.replicas[0].load.charge(1)),
        ("is not in the request index", |scheduler| scheduler.request_index.clear()),
    ];
    for (expected, corrupt) in cases {
        let mut scheduler = scheduler();
        corrupt(&mut scheduler);
        let message = panic_of(|| scheduler.check()).unwrap_or_default();
        assert!(message.contains(expected), "{expected}: {message:?}");
    }
}

#[test]
fn scheduler_checks_itself_once_when_it_becomes_idle() {
    let mut scheduler = scheduler();
    let abort = |id| SchedulerEvent::Abort {
        request: RequestId(id),
        cause: AbortCause::ClientDisconnected,
    };
    let tick = |scheduler: &mut Scheduler, mut inbox| {
        panic_of(|| scheduler.tick(0, &mut inbox, &mut Vec::new()))
    };
    scheduler.replicas[0].load.charge(1);
    assert_eq!(tick(&mut scheduler, vec![abort(1)]), None, "the other request runs");
    assert_eq!(tick(&mut scheduler, vec![abort(2)]), None, "a step is in flight");
    let executors_failed =
        SchedulerEvent::ExecutorsFailed { replica: Replica(0), failure: ExecutorFailure::Exited };
    assert!(
        tick(&mut scheduler, vec![executors_failed])
            .is_some_and(|text| text.contains("load of replica 0"))
    );
    scheduler.was_idle = true;
    assert_eq!(tick(&mut scheduler, Vec::new()), None, "the check is not repeated");
}

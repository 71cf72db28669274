//! Checks that the simulator trusts in must notice what they look for.

use super::*;
use crate::Submit;
use kvcache::{KvConfig, Table};
use protocol::{KvGroup, KvKind, KvSpec, Seat};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// An engine with one seat: one request runs, its first step under way, and another waits.
fn engine() -> Engine {
    let group = KvGroup { layers: vec![0], kind: KvKind::Full, bytes_per_block: 1 };
    let spec = KvSpec { block_tokens: 4, groups: vec![group] };
    let limits = Limits { requests_running: 1, ..Limits::cpu(32, 100) };
    let config = EngineConfig::new(limits, KvConfig::new(spec, 16, [1, 2]));
    let hasher = config.kv.hasher();
    let mut engine = Engine::new(config).unwrap();
    let submit = |id| Event::Submit(Box::new(Submit::greedy(id, (0..9).collect(), &hasher)));
    engine.tick(0, &mut vec![submit(1), submit(2)], &mut Vec::new());
    engine
}

/// What a panic says, if there is one.
fn panic_of(f: impl FnOnce()) -> Option<String> {
    let payload = catch_unwind(AssertUnwindSafe(f)).err()?;
    let text = payload.downcast_ref::<&str>().map(|&text| text.to_owned());
    text.or_else(|| payload.downcast_ref().cloned())
}

fn running(engine: &mut Engine) -> &mut Request {
    let state = &mut engine.domains[0].state;
    let slot = state.running.get(0);
    &mut state.requests[slot]
}

fn waiting(engine: &mut Engine) -> &mut Request {
    let state = &mut engine.domains[0].state;
    let slot = state.waiting.get(0);
    &mut state.requests[slot]
}

#[test]
fn what_does_not_add_up_is_noticed() {
    assert_eq!(panic_of(|| engine().check()), None);
    type Spoil = fn(&mut Engine);
    let cases: [(&str, Spoil); 9] = [
        ("reference counts differ", |engine| {
            engine.domains[0].kv.grow(&mut Table::default(), 1);
        }),
        ("reserved blocks are not free", |engine| engine.domains[0].state.reserved = 100),
        ("reserved blocks miscounted", |engine| engine.domains[0].state.reserved = 1),
        ("waiting tokens miscounted", |engine| engine.domains[0].state.waiting_tokens += 1),
        ("a waiting request holds", |engine| waiting(engine).seat = Some(Seat(0))),
        ("rows in flight of", |engine| running(engine).rows_in_flight += 1),
        ("blocks of", |engine| running(engine).blocks += 1),
        ("load of replica 0 miscounted", |engine| engine.domains[0].load.charge(1)),
        ("is lost", |engine| engine.owners.clear()),
    ];
    for (said, spoil) in cases {
        let mut engine = engine();
        spoil(&mut engine);
        let noticed = panic_of(|| engine.check());
        assert!(noticed.as_ref().is_some_and(|text| text.contains(said)), "{said}: {noticed:?}");
    }
}

#[test]
fn an_engine_checks_itself_once_whenever_it_becomes_idle() {
    let mut engine = engine();
    let abort = |id| Event::Abort { request: RequestId(id), cause: AbortCause::ClientGone };
    let tick =
        |engine: &mut Engine, mut inbox| panic_of(|| engine.tick(0, &mut inbox, &mut Vec::new()));
    engine.domains[0].load.charge(1);
    assert_eq!(tick(&mut engine, vec![abort(1)]), None, "the other runs");
    assert_eq!(tick(&mut engine, vec![abort(2)]), None, "steps are under way");
    let gone = Event::Lost { replica: Replica(0), loss: Loss::Exited };
    assert!(tick(&mut engine, vec![gone]).is_some_and(|text| text.contains("load of replica 0")));
    engine.was_idle = true;
    assert_eq!(tick(&mut engine, Vec::new()), None, "nobody waits for the same check again");
}

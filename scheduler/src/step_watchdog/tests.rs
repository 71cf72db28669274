//! Tests of step timeouts and stragglers.

use super::*;
use protocol::StepCost;

const STEP_COST: StepCost = StepCost { fixed_ns: 8_000_000, per_token_ns: 20_000 };
const WORK: StepWorkload = StepWorkload { tokens: 1, attention_pairs: 0 };

/// Creates a watchdog of three ranks with a fixed deadline of 70 ms.
fn three_ranks() -> StepWatchdog {
    let fixed = Some(Duration::from_millis(70));
    StepWatchdog::new(3, StepDeadlineEstimator::new(fixed, StepCost::default()))
}

#[test]
fn overdue_step_times_out_at_second_heartbeat_of_a_rank() {
    let mut steps = three_ranks();
    steps.step_sent(StepId(1), WORK, false, 1_000);
    assert_eq!(steps.on_heartbeat(0, 1_070), StragglerReport::default());
    steps.rank_done(1, StepId(1));
    let report = StragglerReport { stragglers: vec![0, 2], timeout: None };
    assert_eq!(steps.on_heartbeat(2, 1_071), report, "reported at the heartbeat of any rank");
    assert_eq!(
        steps.on_heartbeat(0, 1_072),
        StragglerReport::default(),
        "stragglers are reported once"
    );
    let overdue = Some(StepTimeout { step: StepId(1), after_ms: 571, limit_ms: 70 });
    assert_eq!(steps.on_heartbeat(2, 1_570).timeout, None);
    assert_eq!(steps.on_heartbeat(2, 1_571).timeout, overdue);
    assert_eq!(steps.stragglers().collect::<Vec<_>>(), [0, 2]);
}

#[test]
fn heartbeats_queued_by_a_pause_count_once() {
    let mut steps = three_ranks();
    steps.step_sent(StepId(1), WORK, false, 0);
    // The thread that reads the link was paused for eight seconds, so it reads eight heartbeats at once:
    // they count as one heartbeat.
    for _ in 0..8 {
        assert_eq!(steps.on_heartbeat(0, 8_000).timeout, None);
    }
    assert_eq!(steps.on_heartbeat(0, 8_499).timeout, None);
    assert!(steps.on_heartbeat(0, 9_000).timeout.is_some(), "the second heartbeat at a later time");
}

#[test]
fn step_sent_in_a_pause_gets_its_full_time() {
    let mut steps = three_ranks();
    steps.poll(100);
    steps.step_sent(StepId(1), WORK, false, 100);
    steps.step_sent(StepId(2), WORK, false, 100);
    steps.poll(1_099);
    assert_eq!(steps.oldest_step(), Some((100, 70)), "shorter than a pause");
    steps.poll(9_099);
    assert_eq!(
        steps.oldest_step(),
        Some((7_850, 70)),
        "999 ms and one poll interval count as step time"
    );
    steps.step_sent(StepId(3), WORK, false, 9_099);
    steps.step_answered(StepId(2), 9_099);
    steps.poll(17_099);
    assert_eq!(steps.oldest_step(), Some((16_849, 70)), "its full time starts after the pause");
    assert_eq!(steps.on_heartbeat(0, 17_099).stragglers, [0, 1, 2]);
    assert!(
        steps.on_heartbeat(0, 17_599).timeout.is_some(),
        "the second heartbeat at a later time"
    );
}

#[test]
fn hang_is_detected_even_with_slow_polls() {
    let fixed = Some(Duration::from_secs(5));
    let mut steps = StepWatchdog::new(1, StepDeadlineEstimator::new(fixed, StepCost::default()));
    steps.step_sent(StepId(1), WORK, false, 0);
    let timed_out_ms = (1..100).map(|poll| poll * 1_500).find(|&now_ms| {
        steps.poll(now_ms);
        steps.on_heartbeat(0, now_ms).timeout.is_some()
    });
    assert_eq!(
        timed_out_ms,
        Some(33_000),
        "poll intervals of 250 ms count, up to 5 s, and a second heartbeat"
    );
}

#[test]
fn paused_steps_do_not_change_the_deadline() {
    let mut steps = StepWatchdog::new(1, StepDeadlineEstimator::new(None, STEP_COST));
    steps.step_sent(StepId(1), WORK, false, 0);
    let expected = steps.expected_wait();
    steps.poll(9_000);
    steps.step_answered(StepId(1), 9_000);
    steps.step_sent(StepId(2), WORK, false, 9_000);
    assert_eq!(steps.expected_wait(), expected);
}

#[test]
fn answered_step_resets_the_timeout() {
    let mut steps = three_ranks();
    steps.step_sent(StepId(1), WORK, false, 0);
    steps.step_sent(StepId(2), WORK, false, 0);
    assert_eq!(steps.on_heartbeat(0, 100).stragglers.len(), 3);
    steps.step_answered(StepId(1), 100);
    assert_eq!(
        steps.on_heartbeat(0, 150),
        StragglerReport::default(),
        "step 2 starts when step 1 is answered"
    );
    assert_eq!(steps.on_heartbeat(0, 171).timeout, None, "first overdue heartbeat");
    steps.on_executor_failure();
    assert_eq!(
        (steps.on_heartbeat(0, 9_000), steps.oldest_step()),
        (StragglerReport::default(), None)
    );
}

#[test]
fn mask_wait_does_not_lengthen_the_next_deadline() {
    let expected_after = |masked: bool, step_time_ms: u64| {
        let mut steps = StepWatchdog::new(1, StepDeadlineEstimator::new(None, STEP_COST));
        steps.step_sent(StepId(1), WORK, masked, 0);
        steps.step_answered(StepId(1), step_time_ms);
        steps.step_sent(StepId(2), WORK, masked, step_time_ms);
        steps.expected_wait()
    };
    let expected = Duration::from_nanos(STEP_COST.fixed_ns + STEP_COST.per_token_ns);
    assert!(expected_after(false, 10) > expected);
    assert_eq!(expected_after(true, 10), expected, "the initial step cost");
    assert_eq!(
        expected_after(true, 14),
        expected_after(false, 14),
        "slow even without the mask wait"
    );
    assert!(expected_after(true, 4) < expected);
}

//! Tests of mask workers: steps, slow grammars and thinking budgets.

use super::*;

/// Timeout of a wait for a permit, on a machine under load.
const PERMIT_TIMEOUT: Duration = Duration::from_mins(4);

/// Returns a vocabulary that, while `slow` is set, blocks on `permits` before it tokenizes a forced text.
fn slow_vocabulary(slow: Arc<AtomicBool>, permits: Receiver<()>) -> GrammarVocabulary {
    let permits = Mutex::new(permits);
    let encode = move |text: &str| {
        if slow.load(Ordering::Relaxed) {
            permits.lock().unwrap().recv_timeout(PERMIT_TIMEOUT).unwrap();
        }
        Some(text.bytes().map(Token::from).collect())
    };
    GrammarVocabulary { encode: Arc::new(encode), ..vocabulary() }
}

#[test]
fn step_proceeds_without_overdue_mask() {
    let (slow, (permits_tx, permits_rx)) = (Arc::new(AtomicBool::new(false)), channel());
    let compiler = GrammarCompiler::new(slow_vocabulary(Arc::clone(&slow), permits_rx)).unwrap();
    let seed = |spec| {
        compile_with(&compiler, &OutputConstraint::new(spec, "test")).unwrap().session_seed(false)
    };
    let (forced, free) =
        (seed(GrammarSpec::Choice(vec!["abc".into()])), seed(GrammarSpec::Regex("[ab]+".into())));
    slow.store(true, Ordering::Relaxed);
    let timings = Arc::new(GrammarTimings::default());
    let (events_tx, events) = channel();
    let mut workers = MaskWorkers::start(&timings, move |request, event| {
        events_tx.send((request, event)).unwrap();
    })
    .unwrap();
    let (executor, commands) = sync_channel(8);
    let wait = Duration::from_secs(20);
    let next = || match commands.recv_timeout(wait).unwrap() {
        ExecutorCommand::Bitmask(mask) => {
            let mut rows: Vec<_> = mask.rows.iter().map(|r| (r.row, r.is_overdue())).collect();
            rows.sort_unstable();
            rows
        }
        other => panic!("{other:?}"),
    };
    let (a, b) = (RequestId(1), RequestId(2));
    let masked = |row, request| MaskedRow { row, request, awaits_drafts: false };
    let guide = |seed| DecodingGuide { grammar: Some(seed), budget: None };
    workers.begin(a, guide(forced));
    workers.begin(b, guide(free));
    workers.request_masks(
        StepId(1),
        vec![masked(0, a), masked(1, b)],
        &executor,
        Duration::from_secs(2),
    );
    assert_eq!(next(), [(0, true), (1, false)], "row 0 is overdue, row 1 is not");
    assert!(events.try_recv().is_err(), "the mask is not ready yet");
    slow.store(false, Ordering::Relaxed);
    permits_tx.send(()).unwrap();
    assert_eq!(
        events.recv_timeout(wait),
        Ok((a, MaskEvent::Ready { output_tokens: 0, wait_for_next: true }))
    );
    assert_eq!(timings.masks_overdue.load(Ordering::Relaxed), 1);
    workers.request_masks(StepId(2), vec![masked(0, a)], &executor, Duration::ZERO);
    assert_eq!(next(), [(0, false)], "the mask was ready before the step");
    let token = |request, byte: u8| TokenEvent {
        request,
        tokens: [Token::from(byte)].as_slice().into(),
        ..TokenEvent::finished(request, FinishReason::Length)
    };
    let running = |event: TokenEvent| {
        SchedulerEffect::TokenEvents(vec![TokenEvent { finish_reason: None, ..event }])
    };
    workers.observe_effects(&[running(token(a, b'a'))]);
    assert_eq!(
        events.recv_timeout(wait),
        Ok((a, MaskEvent::Ready { output_tokens: 1, wait_for_next: true })),
        "the next mask is precomputed from the forced tokens"
    );
    workers.request_masks(StepId(3), vec![masked(0, a)], &executor, Duration::ZERO);
    assert_eq!(next(), [(0, false)]);
    workers.request_masks(StepId(4), vec![masked(5, RequestId(9))], &executor, Duration::ZERO);
    assert_eq!(next(), [(5, false)], "a request without a session is allowed no token");
}

#[test]
fn slow_masks_never_delay_fast_ones() {
    let compiler = GrammarCompiler::new(vocabulary()).unwrap();
    let constraint = OutputConstraint::new(GrammarSpec::Regex("a+".into()), "test");
    let is_slow = |slowest_mask| {
        let compiled = compiler.compile(&constraint, DryRunReport { slowest_mask }).unwrap();
        let grammar = Some(compiled.session_seed(false));
        MaskSession::new(RequestId(1), DecodingGuide { grammar, budget: None }).is_slow()
    };
    assert!(!is_slow(MASK_SLOW_IN_DRY_RUN));
    assert!(is_slow(2 * MASK_SLOW_IN_DRY_RUN));
}

#[test]
fn slowness_of_a_grammar_is_remembered_across_requests() {
    let compiler = GrammarCompiler::new(vocabulary()).unwrap();
    let constraint = OutputConstraint::new(GrammarSpec::Regex("a+".into()), "test");
    let report = DryRunReport { slowest_mask: Duration::ZERO };
    let compiled = compiler.compile(&constraint, report).unwrap();
    let session = || {
        let grammar = Some(compiled.clone().session_seed(false));
        MaskSession::new(RequestId(1), DecodingGuide { grammar, budget: None })
    };
    assert!(!session().is_slow());
    compiled.is_slow.store(true, Ordering::Relaxed);
    assert!(session().is_slow());
}

#[test]
fn waiting_and_ended_requests_hold_no_matcher_copy() {
    let compiler = GrammarCompiler::new(vocabulary()).unwrap();
    let constraint = OutputConstraint::new(GrammarSpec::Regex("a+".into()), "test");
    let compiled = compile_with(&compiler, &constraint).unwrap();
    let seeds: Vec<_> = (0..3).map(|_| compiled.session_seed(false)).collect();
    assert_eq!(compiler.matcher_copy_bytes(), 0);
    let choices = [seeds[0].session(), seeds[0].session()];
    assert_eq!(compiler.matcher_copy_bytes(), compiled.bytes, "choices of one request share");
    let other = seeds[1].session();
    assert_eq!(compiler.matcher_copy_bytes(), 2 * compiled.bytes);
    drop((choices, other, seeds));
    assert_eq!(compiler.matcher_copy_bytes(), 0);
}

/// Reasoning tracker for an output whose reasoning ends with `!`.
#[derive(Clone, Default)]
struct ExclamationReasoningTracker(bool);

impl ReasoningTracker for ExclamationReasoningTracker {
    fn push(&mut self, token: Token) {
        self.0 |= token == u32::from(b'!');
    }

    fn state(&self) -> ReasoningState {
        if self.0 {
            ReasoningState::After
        } else {
            ReasoningState::Inside { at_character_boundary: true }
        }
    }

    fn boxed_clone(&self) -> Box<dyn ReasoningTracker> {
        Box::new(self.clone())
    }
}

pub(crate) fn budget(tokens: u32) -> ThinkingBudget {
    let new_tracker =
        Arc::new(|| Box::new(ExclamationReasoningTracker::default()) as Box<dyn ReasoningTracker>);
    ThinkingBudget {
        tokens,
        end_marker: [u32::from(b'-'), u32::from(b'!')].into(),
        answer_opening: None,
        vocab_size: END + 1,
        new_tracker,
    }
}

/// Mask workers (threads that compute token bitmasks), and the channels to which they send.
pub(crate) struct MaskWorkerHarness {
    pub(crate) workers: MaskWorkers,
    mask_events: Receiver<(RequestId, MaskEvent)>,
    executor: SyncSender<ExecutorCommand>,
    pub(crate) commands: Receiver<ExecutorCommand>,
    step: u64,
}

impl MaskWorkerHarness {
    pub(crate) const WAIT: Duration = Duration::from_secs(20);

    /// Checks that the next event is the end of the masks of `request`.
    fn expect_done(&self, request: RequestId) {
        let event = self.mask_events.recv_timeout(Self::WAIT);
        assert_eq!(event, Ok((request, MaskEvent::Done)));
    }

    pub(crate) fn new() -> Self {
        let (events_tx, mask_events) = channel();
        let listener = move |request, event| events_tx.send((request, event)).unwrap_or_default();
        let timings = Arc::new(GrammarTimings::default());
        let workers = MaskWorkers::start(&timings, listener).unwrap();
        let (executor, commands) = sync_channel(8);
        Self { workers, mask_events, executor, commands, step: 0 }
    }

    pub(crate) fn commit_text(&mut self, request: RequestId, text: &str) {
        for byte in text.bytes() {
            let tokens = [Token::from(byte)].as_slice().into();
            let event =
                TokenEvent { tokens, ..TokenEvent::finished(request, FinishReason::Length) };
            let event = TokenEvent { finish_reason: None, ..event };
            self.workers.observe_effects(&[SchedulerEffect::TokenEvents(vec![event])]);
        }
    }

    /// Requests the token bitmask for a step with one row; `expected` is the step's expected duration.
    pub(crate) fn request(
        &mut self,
        step: StepId,
        request: RequestId,
        awaits_drafts: bool,
        expected: Duration,
    ) {
        let rows = vec![MaskedRow { row: 0, request, awaits_drafts }];
        self.workers.request_masks(step, rows, &self.executor, expected);
    }

    /// Returns the allowed tokens as text; `None` if all tokens are allowed.
    fn allowed(&mut self, request: RequestId) -> Option<String> {
        self.step += 1;
        self.request(StepId(self.step), request, false, Self::WAIT);
        let ExecutorCommand::Bitmask(mask) = self.commands.recv_timeout(Self::WAIT).unwrap() else {
            panic!("expected a bitmask")
        };
        let bitmask = &mask.rows[0].bitmasks[0];
        let ids: Vec<Token> = (0..=END).filter(|&id| bitmask.allows(id)).collect();
        let text = ids.iter().map(|&id| char::from(id as u8)).collect();
        (ids.len() as u32 <= END).then_some(text)
    }
}

#[test]
fn thinking_budget_masks_only_once_spent() {
    let mut harness = MaskWorkerHarness::new();
    let [spent, early, late] = [1, 2, 3].map(RequestId);
    for request in [spent, early, late] {
        harness.workers.begin(request, DecodingGuide { grammar: None, budget: Some(budget(100)) });
    }
    harness.commit_text(spent, &"a".repeat(100));
    assert_eq!(harness.allowed(spent).as_deref(), Some("-"));
    harness.commit_text(spent, "-");
    assert_eq!(harness.allowed(spent).as_deref(), Some("!"));
    harness.commit_text(spent, "!");
    assert_eq!(harness.allowed(spent), None, "planned before the event");
    harness.expect_done(spent);
    harness.commit_text(spent, "after");
    assert_eq!(harness.allowed(spent), None);

    harness.commit_text(early, &("aa!".to_owned() + &"b".repeat(70)));
    harness.expect_done(early); // Without any mask.
    harness.commit_text(late, &("a".repeat(99) + "!"));
    assert_eq!(harness.allowed(late), None);
    harness.expect_done(late);
    assert!(harness.mask_events.try_recv().is_err(), "no other event");
}

#[test]
fn grammar_starts_after_the_forced_end_marker() {
    let compiler = GrammarCompiler::new(vocabulary()).unwrap();
    let spec = GrammarSpec::Regex("[xy]+".to_owned());
    let constraint = OutputConstraint::new(spec, "test").start_after("!");
    let grammar = Some(compile_with(&compiler, &constraint).unwrap().session_seed(true));
    let mut harness = MaskWorkerHarness::new();
    for (i, (tokens, reasoning, forced)) in
        [(3, "abc", true), (0, "", true), (9, "ab-!", false)].into_iter().enumerate()
    {
        let request = RequestId(i as u64);
        let budget = Some(budget(tokens));
        harness.workers.begin(request, DecodingGuide { grammar: grammar.clone(), budget });
        for byte in reasoning.chars() {
            let free = harness.allowed(request);
            assert!(free.is_none_or(|ids| ids.len() > 100), "reasoning is unrestricted");
            harness.commit_text(request, &byte.to_string());
        }
        for byte in ["-", "!"].into_iter().filter(|_| forced) {
            assert_eq!(harness.allowed(request).as_deref(), Some(byte), "{reasoning}");
            harness.commit_text(request, byte);
        }
        assert_eq!(harness.allowed(request).as_deref(), Some("xy"), "{reasoning}");
    }
    assert!(
        harness.mask_events.try_iter().all(|(_, event)| event != MaskEvent::Done),
        "the grammar continues"
    );
}

//! Tests of compilation, rejection and masks with a vocabulary of single-byte tokens.

use super::cache::GrammarCache;
use super::compile::{CompiledGrammar, DryRunReport, GrammarCompiler, GrammarError};
use super::limits::MASK_SLOW_IN_DRY_RUN;
use super::mask_session::MaskSession;
use super::{
    DecodingGuide, GrammarSession, GrammarSpec, GrammarTimings, GrammarVocabulary, JsonWhitespace,
    MaskEvent, MaskWorkers, MaskedRow, OutputConstraint, ReasoningState, ReasoningTracker,
    ThinkingBudget,
};
use protocol::{ExecutorCommand, RequestId, StepId, Token};
use scheduler::{FinishReason, SchedulerEffect, TokenEvent};
use serde_json::{Value, json};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, channel, sync_channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

pub(super) const END: Token = 256;

/// Returns a vocabulary with one token per byte and one end-of-text token.
pub(super) fn vocabulary() -> GrammarVocabulary {
    let mut tokens: Vec<Vec<u8>> = (0..=255).map(|byte| vec![byte]).collect();
    tokens.push(b"<|end|>".to_vec());
    let encode = Arc::new(|text: &str| Some(text.bytes().map(Token::from).collect()));
    GrammarVocabulary { tokens, special: vec![END], end_ids: vec![END], encode }
}

fn compile(spec: GrammarSpec) -> Result<CompiledGrammar, GrammarError> {
    compile_with(&GrammarCompiler::new(vocabulary()).unwrap(), &OutputConstraint::new(spec, "test"))
}

/// Performs the dry run (test compilation) of a constraint in this process, and then compiles the
/// constraint.
pub(super) fn compile_with(
    compiler: &GrammarCompiler,
    constraint: &OutputConstraint,
) -> Result<CompiledGrammar, GrammarError> {
    let report = compiler.dry_run(constraint)?;
    compiler.compile(constraint, report)
}

pub(super) fn json_spec(schema: Value) -> GrammarSpec {
    GrammarSpec::Json { schema, whitespace: JsonWhitespace::None }
}

/// Returns the allowed tokens as text; `$` represents the end-of-text token.
fn allowed(session: &mut GrammarSession) -> String {
    let Some(mask) = session.mask() else { return "nothing".to_owned() };
    let ids = (0..=END).filter(|id| mask[*id as usize / 32] >> (id % 32) & 1 == 1);
    ids.map(|id| if id == END { '$' } else { char::from(id as u8) }).collect()
}

fn advance(session: &mut GrammarSession, text: &str) {
    for byte in text.bytes() {
        session.advance(&[Token::from(byte)]);
    }
}

/// Whether each byte of a text is allowed and the text may end after the last byte.
pub(super) fn accepts(compiled: &CompiledGrammar, text: &str) -> bool {
    let mut session = compiled.session_seed(false).session();
    for byte in text.bytes() {
        let fits =
            session.mask().is_some_and(|m| m[usize::from(byte) / 32] >> (byte % 32) & 1 == 1);
        if !fits {
            return false;
        }
        session.advance(&[Token::from(byte)]);
    }
    session.may_end()
}

#[test]
fn every_spec_accepts_exactly_its_language() {
    let schema = json!({"type": "object", "properties": {"a": {"type": "integer", "minimum": 3}},
        "required": ["a"], "additionalProperties": false});
    let spaced = GrammarSpec::Json { schema: schema.clone(), whitespace: JsonWhitespace::Any };
    let cases = [
        (
            json_spec(schema),
            vec![r#"{"a":3}"#, r#"{"a":17}"#],
            vec![r#"{"a":2}"#, "{}", r#"{"a": 3}"#],
        ),
        (spaced, vec!["{\n \"a\" : 3 }"], vec![r#"{"b":3}"#]),
        (
            GrammarSpec::json_object(JsonWhitespace::None),
            vec!["{}", r#"{"x":[1,null]}"#],
            vec!["[]", "1"],
        ),
        (
            GrammarSpec::Regex("a[bc]{2}|d/e".to_owned()),
            vec!["abc", "d/e"],
            vec!["ab", "abcd", "xabc"],
        ),
        (
            GrammarSpec::Choice(vec!["yes \"x\"".into(), "no\n".into()]),
            vec!["yes \"x\"", "no\n"],
            vec!["yes"],
        ),
        (
            GrammarSpec::Lark("start: \"<\" x \">\"\nx: /[0-9]/ | start".into()),
            vec!["<<7>>"],
            vec!["<7", "7"],
        ),
        (json_spec(json!(true)), vec!["1", "\"a\""], vec!["a"]),
    ];
    for (spec, good, bad) in cases {
        let compiled = compile(spec.clone()).unwrap_or_else(|e| panic!("{spec:?}: {e}"));
        for text in good {
            assert!(accepts(&compiled, text), "{spec:?} rejects {text}");
        }
        for text in bad {
            assert!(!accepts(&compiled, text), "{spec:?} accepts {text}");
        }
    }
}

#[test]
fn eos_is_allowed_exactly_where_the_grammar_may_end() {
    let compiled = compile(GrammarSpec::Regex("a(b|bb)?".to_owned())).unwrap();
    let mut session = compiled.session_seed(false).session();
    assert_eq!(allowed(&mut session), "a");
    advance(&mut session, "a");
    assert_eq!(allowed(&mut session), "b$");
    advance(&mut session, "b");
    assert_eq!(allowed(&mut session), "b$");
    advance(&mut session, "b");
    assert_eq!(allowed(&mut session), "$");
    let mut session = compiled.session_seed(true).session();
    advance(&mut session, "a");
    assert_eq!(allowed(&mut session), "b", "the end is ignored");
    advance(&mut session, "bb");
    assert_eq!(allowed(&mut session), "$", "an ignored end is allowed if no other token is");
    advance(&mut session, "c");
    assert_eq!(allowed(&mut session), "nothing", "a token outside the grammar");
}

#[test]
fn a_choice_may_have_thousands_of_texts() {
    let texts: Vec<String> = (0..4_000).map(|i| format!("w{}", i * 7_919)).collect();
    let compiled = compile(GrammarSpec::Choice(texts)).unwrap();
    for good in ["w0", "w7919", "w31668081"] {
        assert!(accepts(&compiled, good), "{good} is rejected");
    }
    for bad in ["w", "w1", "w79190000", "x"] {
        assert!(!accepts(&compiled, bad), "{bad} is accepted");
    }
}

#[test]
fn sessions_of_one_grammar_are_independent() {
    let compiled = compile(GrammarSpec::Choice(vec!["ab".into(), "cd".into()])).unwrap();
    let (mut first, mut second) =
        (compiled.session_seed(false).session(), compiled.session_seed(false).session());
    advance(&mut first, "a");
    advance(&mut second, "c");
    assert_eq!((allowed(&mut first), allowed(&mut second)), ("b".into(), "d".into()));
    assert_eq!(allowed(&mut compiled.session_seed(false).session()), "ac");
}

#[test]
fn constraint_may_start_after_a_marker() {
    let compiler = GrammarCompiler::new(vocabulary()).unwrap();
    for spec in [
        GrammarSpec::Choice(vec!["yes".into()]),
        GrammarSpec::Regex("yes".into()),
        json_spec(json!({"const": "yes"})),
    ] {
        let quoted = matches!(spec, GrammarSpec::Json { .. });
        let constraint = OutputConstraint::new(spec, "test").start_after("</think>");
        let compiled = compile_with(&compiler, &constraint).unwrap();
        let output = if quoted { "\"yes\"" } else { "yes" };
        assert!(accepts(&compiled, &format!("so: no </thin or </think>{output}")));
        assert!(!accepts(&compiled, output));
        assert!(!accepts(&compiled, "</think>no"));
    }
}

#[test]
fn unenforceable_constraints_are_rejected() {
    let specs = [
        json_spec(json!({"type": "array", "uniqueItems": true})),
        json_spec(json!({"not": {"type": "string"}})),
        json_spec(json!({"type": "object", "x-guidance": {"lenient": true}, "uniqueItems": true})),
        json_spec(json!({"$ref": "http://127.0.0.1:1/schema"})),
        json_spec(json!({"$ref": "#/nowhere"})),
        json_spec(json!({"type": "text"})),
        json_spec(json!(false)),
        GrammarSpec::Regex("(".to_owned()),
        GrammarSpec::Regex(r"(a)\1".to_owned()),
        GrammarSpec::Regex(r"(?=a)b".to_owned()),
        GrammarSpec::Lark("start: missing".to_owned()),
        GrammarSpec::Lark("start: \"a".to_owned()),
        GrammarSpec::Lark(String::new()),
    ];
    for spec in specs {
        let result = compile(spec.clone());
        assert!(matches!(result, Err(GrammarError::Invalid(_))), "{spec:?}: {result:?}");
    }
}

#[test]
fn whitespace_pattern_errors_differ_from_schema_errors() {
    let spaced = |schema: Value, regex: &str| {
        compile(GrammarSpec::Json { schema, whitespace: JsonWhitespace::Pattern(regex.to_owned()) })
    };
    assert!(spaced(json!({}), "[ ]?").is_ok());
    for regex in ["(", "(?=a) ", &"(".repeat(200)] {
        let result = spaced(json!({}), regex);
        assert!(matches!(result, Err(GrammarError::InvalidSpaces(_))), "{regex}: {result:?}");
    }
    let result = spaced(json!({"not": {}}), " *");
    assert!(matches!(result, Err(GrammarError::Invalid(_))), "{result:?}");
}

#[test]
fn cache_evicts_lru_within_its_byte_limit() {
    let compiled = |text: &str, bytes: usize| {
        let mut compiled = compile(GrammarSpec::Regex(text.to_owned())).unwrap();
        compiled.bytes = bytes;
        compiled
    };
    let mut cache = GrammarCache::new(310);
    for name in ["a", "b", "c"] {
        cache.put(name.to_owned(), compiled(name, 100));
    }
    assert!(cache.get("a").is_some());
    cache.put("d".to_owned(), compiled("d", 100));
    assert!(cache.get("b").is_none(), "the least recently used entry is evicted");
    assert!(cache.get("a").is_some() && cache.get("c").is_some() && cache.get("d").is_some());
    assert_eq!(cache.usage(), (3, 303));
    cache.put("large".to_owned(), compiled("x", 400));
    assert_eq!(cache.usage(), (3, 303));
}

/// Returns a vocabulary that, while `slow` is set, blocks on `permits` before it tokenizes a forced text.
fn slow_vocabulary(slow: Arc<AtomicBool>, permits: Receiver<()>) -> GrammarVocabulary {
    let permits = Mutex::new(permits);
    let encode = move |text: &str| {
        if slow.load(Ordering::Relaxed) {
            permits.lock().unwrap().recv().unwrap();
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

pub(super) fn budget(tokens: u32) -> ThinkingBudget {
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
pub(super) struct MaskWorkerHarness {
    pub(super) workers: MaskWorkers,
    mask_events: Receiver<(RequestId, MaskEvent)>,
    executor: SyncSender<ExecutorCommand>,
    pub(super) commands: Receiver<ExecutorCommand>,
    step: u64,
}

impl MaskWorkerHarness {
    pub(super) const WAIT: Duration = Duration::from_secs(20);

    /// Checks that the next event is the end of the masks of `request`.
    fn expect_done(&self, request: RequestId) {
        let event = self.mask_events.recv_timeout(Self::WAIT);
        assert_eq!(event, Ok((request, MaskEvent::Done)));
    }

    pub(super) fn new() -> Self {
        let (events_tx, mask_events) = channel();
        let listener = move |request, event| events_tx.send((request, event)).unwrap_or_default();
        let timings = Arc::new(GrammarTimings::default());
        let workers = MaskWorkers::start(&timings, listener).unwrap();
        let (executor, commands) = sync_channel(8);
        Self { workers, mask_events, executor, commands, step: 0 }
    }

    pub(super) fn commit_text(&mut self, request: RequestId, text: &str) {
        for byte in text.bytes() {
            let tokens = [Token::from(byte)].as_slice().into();
            let event =
                TokenEvent { tokens, ..TokenEvent::finished(request, FinishReason::Length) };
            let event = TokenEvent { finish_reason: None, ..event };
            self.workers.observe_effects(&[SchedulerEffect::TokenEvents(vec![event])]);
        }
    }

    /// Requests the token bitmask for a step with one row; `expected` is the step's expected duration.
    pub(super) fn request(
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

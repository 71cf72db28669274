//! Grammars over single bytes as tokens: what compiles, what is refused, and what a session allows.

use super::cache::Cache;
use super::compile::{Compiled, Compiler, Findings, GrammarError};
use super::limits::MASK_SLOW_IN_TRIAL;
use super::mask_seat::Seat;
use super::{
    Budget, Constraint, Form, GrammarTimings, Guide, MaskWorkers, News, Reader, Reading, Session,
    Spaces, Vocabulary,
};
use protocol::{RequestId, StepId, ToExecutor, Token};
use scheduler::{Effect, Finish, TokenEvent};
use serde_json::{Value, json};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, channel, sync_channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

pub(super) const END: Token = 256;

/// The bytes, and one id that ends a text.
pub(super) fn vocabulary() -> Vocabulary {
    let mut tokens: Vec<Vec<u8>> = (0..=255).map(|byte| vec![byte]).collect();
    tokens.push(b"<|end|>".to_vec());
    let encode = Arc::new(|text: &str| Some(text.bytes().map(Token::from).collect()));
    Vocabulary { tokens, special: vec![END], ends: vec![END], encode }
}

fn compile(form: Form) -> Result<Compiled, GrammarError> {
    compile_with(&Compiler::new(vocabulary()).unwrap(), &Constraint::new(form, "test"))
}

/// Tries and compiles.
pub(super) fn compile_with(
    compiler: &Compiler,
    constraint: &Constraint,
) -> Result<Compiled, GrammarError> {
    let findings = compiler.try_out(constraint)?;
    compiler.compile(constraint, findings)
}

pub(super) fn json_form(schema: Value) -> Form {
    Form::Json { schema, spaces: Spaces::None }
}

/// The allowed ids as text; `$` is the end.
fn allowed(session: &mut Session) -> String {
    let Some(mask) = session.mask() else { return "nothing".to_owned() };
    let ids = (0..=END).filter(|id| mask[*id as usize / 32] >> (id % 32) & 1 == 1);
    ids.map(|id| if id == END { '$' } else { char::from(id as u8) }).collect()
}

fn advance(session: &mut Session, text: &str) {
    for byte in text.bytes() {
        session.advance(&[Token::from(byte)]);
    }
}

/// Whether a text is allowed byte by byte and may end.
fn accepts(compiled: &Compiled, text: &str) -> bool {
    let mut session = compiled.seed(false).session();
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
fn every_form_accepts_its_texts_and_no_others() {
    let schema = json!({"type": "object", "properties": {"a": {"type": "integer", "minimum": 3}},
        "required": ["a"], "additionalProperties": false});
    let spaced = Form::Json { schema: schema.clone(), spaces: Spaces::Any };
    let cases = [
        (
            json_form(schema),
            vec![r#"{"a":3}"#, r#"{"a":17}"#],
            vec![r#"{"a":2}"#, "{}", r#"{"a": 3}"#],
        ),
        (spaced, vec!["{\n \"a\" : 3 }"], vec![r#"{"b":3}"#]),
        (Form::json_object(Spaces::None), vec!["{}", r#"{"x":[1,null]}"#], vec!["[]", "1"]),
        (Form::Regex("a[bc]{2}|d/e".to_owned()), vec!["abc", "d/e"], vec!["ab", "abcd", "xabc"]),
        (
            Form::Choice(vec!["yes \"x\"".into(), "no\n".into()]),
            vec!["yes \"x\"", "no\n"],
            vec!["yes"],
        ),
        (
            Form::Lark("start: \"<\" x \">\"\nx: /[0-9]/ | start".into()),
            vec!["<<7>>"],
            vec!["<7", "7"],
        ),
        (json_form(json!(true)), vec!["1", "\"a\""], vec!["a"]),
    ];
    for (form, good, bad) in cases {
        let compiled = compile(form.clone()).unwrap_or_else(|e| panic!("{form:?}: {e}"));
        for text in good {
            assert!(accepts(&compiled, text), "{form:?} refuses {text}");
        }
        for text in bad {
            assert!(!accepts(&compiled, text), "{form:?} accepts {text}");
        }
    }
}

#[test]
fn the_end_comes_where_it_may_and_where_it_must() {
    let compiled = compile(Form::Regex("a(b|bb)?".to_owned())).unwrap();
    let mut session = compiled.seed(false).session();
    assert_eq!(allowed(&mut session), "a");
    advance(&mut session, "a");
    assert_eq!(allowed(&mut session), "b$");
    advance(&mut session, "b");
    assert_eq!(allowed(&mut session), "b$");
    advance(&mut session, "b");
    assert_eq!(allowed(&mut session), "$");
    let mut session = compiled.seed(true).session();
    advance(&mut session, "a");
    assert_eq!(allowed(&mut session), "b", "an ignored end");
    advance(&mut session, "bb");
    assert_eq!(allowed(&mut session), "$", "nothing but an ignored end");
    advance(&mut session, "c");
    assert_eq!(allowed(&mut session), "nothing", "a token outside the grammar");
}

#[test]
fn a_choice_may_have_thousands_of_texts() {
    let texts: Vec<String> = (0..4_000).map(|i| format!("w{}", i * 7_919)).collect();
    let compiled = compile(Form::Choice(texts)).unwrap();
    for good in ["w0", "w7919", "w31668081"] {
        assert!(accepts(&compiled, good), "{good} is refused");
    }
    for bad in ["w", "w1", "w79190000", "x"] {
        assert!(!accepts(&compiled, bad), "{bad} is accepted");
    }
}

#[test]
fn sessions_of_one_grammar_share_nothing() {
    let compiled = compile(Form::Choice(vec!["ab".into(), "cd".into()])).unwrap();
    let (mut first, mut second) = (compiled.seed(false).session(), compiled.seed(false).session());
    advance(&mut first, "a");
    advance(&mut second, "c");
    assert_eq!((allowed(&mut first), allowed(&mut second)), ("b".into(), "d".into()));
    assert_eq!(allowed(&mut compiled.seed(false).session()), "ac");
}

#[test]
fn a_constraint_may_begin_behind_a_marker() {
    let compiler = Compiler::new(vocabulary()).unwrap();
    for form in [
        Form::Choice(vec!["yes".into()]),
        Form::Regex("yes".into()),
        json_form(json!({"const": "yes"})),
    ] {
        let quoted = matches!(form, Form::Json { .. });
        let constraint = Constraint::new(form, "test").after("</think>");
        let compiled = compile_with(&compiler, &constraint).unwrap();
        let answer = if quoted { "\"yes\"" } else { "yes" };
        assert!(accepts(&compiled, &format!("so: no </thin or </think>{answer}")));
        assert!(!accepts(&compiled, answer));
        assert!(!accepts(&compiled, "</think>no"));
    }
}

#[test]
fn what_cannot_be_enforced_is_refused() {
    let forms = [
        json_form(json!({"type": "array", "uniqueItems": true})),
        json_form(json!({"not": {"type": "string"}})),
        json_form(json!({"type": "object", "x-guidance": {"lenient": true}, "uniqueItems": true})),
        json_form(json!({"$ref": "http://127.0.0.1:1/schema"})),
        json_form(json!({"$ref": "#/nowhere"})),
        json_form(json!({"type": "text"})),
        json_form(json!(false)),
        Form::Regex("(".to_owned()),
        Form::Regex(r"(a)\1".to_owned()),
        Form::Regex(r"(?=a)b".to_owned()),
        Form::Lark("start: missing".to_owned()),
        Form::Lark("start: \"a".to_owned()),
        Form::Lark(String::new()),
    ];
    for form in forms {
        let result = compile(form.clone());
        assert!(matches!(result, Err(GrammarError::Invalid(_))), "{form:?}: {result:?}");
    }
}

#[test]
fn a_bad_pattern_of_white_space_is_told_from_a_bad_schema() {
    let spaced = |schema: Value, regex: &str| {
        compile(Form::Json { schema, spaces: Spaces::Pattern(regex.to_owned()) })
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
fn the_cache_keeps_what_is_asked_for_and_its_bound() {
    let made = |text: &str, bytes: usize| {
        let mut compiled = compile(Form::Regex(text.to_owned())).unwrap();
        compiled.bytes = bytes;
        compiled
    };
    let mut cache = Cache::new(310);
    for name in ["a", "b", "c"] {
        cache.put(name.to_owned(), made(name, 100));
    }
    assert!(cache.get("a").is_some());
    cache.put("d".to_owned(), made("d", 100));
    assert!(cache.get("b").is_none(), "the one not asked for longest has to go");
    assert!(cache.get("a").is_some() && cache.get("c").is_some() && cache.get("d").is_some());
    assert_eq!(cache.held(), (3, 303));
    cache.put("large".to_owned(), made("x", 400));
    assert_eq!(cache.held(), (3, 303));
}

/// A vocabulary that, once told to, waits for leave before it spells a text that has no choice in it.
fn slow_vocabulary(slow: Arc<AtomicBool>, leave: Receiver<()>) -> Vocabulary {
    let leave = Mutex::new(leave);
    let encode = move |text: &str| {
        if slow.load(Ordering::Relaxed) {
            leave.lock().unwrap().recv().unwrap();
        }
        Some(text.bytes().map(Token::from).collect())
    };
    Vocabulary { encode: Arc::new(encode), ..vocabulary() }
}

#[test]
fn a_step_goes_on_without_a_mask_that_is_late() {
    let (slow, (give, leave)) = (Arc::new(AtomicBool::new(false)), channel());
    let compiler = Compiler::new(slow_vocabulary(Arc::clone(&slow), leave)).unwrap();
    let seed = |form| compile_with(&compiler, &Constraint::new(form, "test")).unwrap().seed(false);
    let (forced, free) =
        (seed(Form::Choice(vec!["abc".into()])), seed(Form::Regex("[ab]+".into())));
    slow.store(true, Ordering::Relaxed);
    let timings = Arc::new(GrammarTimings::default());
    let (announced, news) = channel();
    let mut workers = MaskWorkers::start(&timings, move |request, news| {
        announced.send((request, news)).unwrap();
    })
    .unwrap();
    let (executor, sent) = sync_channel(8);
    let wait = Duration::from_secs(20);
    let next = || match sent.recv_timeout(wait).unwrap() {
        ToExecutor::Mask(mask) => {
            let mut rows: Vec<_> = mask.rows.iter().map(|r| (r.row, r.late)).collect();
            rows.sort_unstable();
            rows
        }
        other => panic!("{other:?}"),
    };
    let (a, b) = (RequestId(1), RequestId(2));
    let guide = |seed| Guide { grammar: Some(seed), budget: None };
    workers.begin(a, guide(forced));
    workers.begin(b, guide(free));
    workers.make(StepId(1), vec![(0, a), (1, b)], &executor, Duration::from_secs(2));
    assert_eq!(next(), [(0, true), (1, false)], "one waits, its neighbour does not");
    assert!(news.try_recv().is_err(), "it is not there yet");
    slow.store(false, Ordering::Relaxed);
    give.send(()).unwrap();
    assert_eq!(news.recv_timeout(wait), Ok((a, News::Made { outputs: 0, ahead: true })));
    assert_eq!(timings.masks_late.load(Ordering::Relaxed), 1);
    workers.make(StepId(2), vec![(0, a)], &executor, Duration::ZERO);
    assert_eq!(next(), [(0, false)], "it waits for the step now");
    let token = |request, byte: u8| TokenEvent {
        request,
        tokens: [Token::from(byte)].as_slice().into(),
        ..TokenEvent::end(request, Finish::Length)
    };
    let heard = |event: TokenEvent| Effect::Tokens(vec![TokenEvent { finish: None, ..event }]);
    workers.hear(&[heard(token(a, b'a'))]);
    assert_eq!(
        news.recv_timeout(wait),
        Ok((a, News::Made { outputs: 1, ahead: true })),
        "the next one is made ahead, spelled already"
    );
    workers.make(StepId(3), vec![(0, a)], &executor, Duration::ZERO);
    assert_eq!(next(), [(0, false)]);
    workers.make(StepId(4), vec![(5, RequestId(9))], &executor, Duration::ZERO);
    assert_eq!(next(), [(5, false)], "nobody follows it: it is allowed nothing");
}

#[test]
fn masks_that_a_trial_has_found_slow_never_hold_up_quick_ones() {
    let compiler = Compiler::new(vocabulary()).unwrap();
    let constraint = Constraint::new(Form::Regex("a+".into()), "test");
    let is_slow = |slowest_mask| {
        let compiled = compiler.compile(&constraint, Findings { slowest_mask }).unwrap();
        let grammar = Some(compiled.seed(false));
        Seat::new(RequestId(1), Guide { grammar, budget: None }).is_slow()
    };
    assert!(!is_slow(MASK_SLOW_IN_TRIAL));
    assert!(is_slow(2 * MASK_SLOW_IN_TRIAL));
}

#[test]
fn what_a_request_finds_out_about_its_grammar_holds_for_the_next_ones() {
    let compiler = Compiler::new(vocabulary()).unwrap();
    let constraint = Constraint::new(Form::Regex("a+".into()), "test");
    let findings = Findings { slowest_mask: Duration::ZERO };
    let kept = compiler.compile(&constraint, findings).unwrap();
    let seat = || {
        let grammar = Some(kept.clone().seed(false));
        Seat::new(RequestId(1), Guide { grammar, budget: None })
    };
    assert!(!seat().is_slow());
    kept.is_slow.store(true, Ordering::Relaxed);
    assert!(seat().is_slow());
}

#[test]
fn a_request_that_waits_has_no_copy_and_one_that_ends_leaves_none() {
    let compiler = Compiler::new(vocabulary()).unwrap();
    let constraint = Constraint::new(Form::Regex("a+".into()), "test");
    let compiled = compile_with(&compiler, &constraint).unwrap();
    let seeds: Vec<_> = (0..3).map(|_| compiled.seed(false)).collect();
    assert_eq!(compiler.copies_held(), 0);
    let choices = [seeds[0].session(), seeds[0].session()];
    assert_eq!(compiler.copies_held(), compiled.bytes, "choices of one request share");
    let other = seeds[1].session();
    assert_eq!(compiler.copies_held(), 2 * compiled.bytes);
    drop((choices, other, seeds));
    assert_eq!(compiler.copies_held(), 0);
}

/// Reasons until `!`.
#[derive(Default)]
struct UntilBang(bool);

impl Reader for UntilBang {
    fn push(&mut self, token: Token) {
        self.0 |= token == u32::from(b'!');
    }

    fn stands(&self) -> Reading {
        if self.0 { Reading::Behind } else { Reading::Inside { whole: true } }
    }
}

fn budget(tokens: u32) -> Budget {
    let reader = Arc::new(|| Box::new(UntilBang::default()) as Box<dyn Reader>);
    Budget { tokens, mark: [u32::from(b'-'), u32::from(b'!')].into(), vocab_size: END + 1, reader }
}

/// Mask workers, and what comes of them.
struct Bench {
    workers: MaskWorkers,
    news: Receiver<(RequestId, News)>,
    executor: SyncSender<ToExecutor>,
    sent: Receiver<ToExecutor>,
    step: u64,
}

impl Bench {
    const WAIT: Duration = Duration::from_secs(20);

    fn new() -> Self {
        let (announced, news) = channel();
        let announce = move |request, news| announced.send((request, news)).unwrap_or_default();
        let timings = Arc::new(GrammarTimings::default());
        let workers = MaskWorkers::start(&timings, announce).unwrap();
        let (executor, sent) = sync_channel(8);
        Self { workers, news, executor, sent, step: 0 }
    }

    fn say(&mut self, request: RequestId, text: &str) {
        for byte in text.bytes() {
            let tokens = [Token::from(byte)].as_slice().into();
            let event = TokenEvent { tokens, ..TokenEvent::end(request, Finish::Length) };
            let event = TokenEvent { finish: None, ..event };
            self.workers.hear(&[Effect::Tokens(vec![event])]);
        }
    }

    /// The ids that may come next; `None` = all.
    fn allowed(&mut self, request: RequestId) -> Option<String> {
        self.step += 1;
        let step = StepId(self.step);
        self.workers.make(step, vec![(0, request)], &self.executor, Self::WAIT);
        let ToExecutor::Mask(mask) = self.sent.recv_timeout(Self::WAIT).unwrap() else {
            panic!("a mask is awaited")
        };
        let bit = |id: &Token| mask.rows[0].allowed[*id as usize / 32] >> (id % 32) & 1 == 1;
        let ids: Vec<Token> = (0..=END).filter(bit).collect();
        let text = ids.iter().map(|&id| char::from(id as u8)).collect();
        (ids.len() as u32 <= END).then_some(text)
    }
}

#[test]
fn a_budget_alone_masks_only_where_it_is_spent() {
    let mut bench = Bench::new();
    let [spent, early, late] = [1, 2, 3].map(RequestId);
    for request in [spent, early, late] {
        bench.workers.begin(request, Guide { grammar: None, budget: Some(budget(100)) });
    }
    bench.say(spent, &"a".repeat(100));
    assert_eq!(bench.allowed(spent).as_deref(), Some("-"));
    bench.say(spent, "-");
    assert_eq!(bench.allowed(spent).as_deref(), Some("!"));
    bench.say(spent, "!");
    assert_eq!(bench.allowed(spent), None, "planned before the news");
    assert_eq!(bench.news.recv_timeout(Bench::WAIT), Ok((spent, News::Over)));
    bench.say(spent, "behind");
    assert_eq!(bench.allowed(spent), None);

    bench.say(early, &("aa!".to_owned() + &"b".repeat(70)));
    assert_eq!(bench.news.recv_timeout(Bench::WAIT), Ok((early, News::Over)), "and no mask at all");
    bench.say(late, &("a".repeat(99) + "!"));
    assert_eq!(bench.allowed(late), None);
    assert_eq!(bench.news.recv_timeout(Bench::WAIT), Ok((late, News::Over)));
    assert!(bench.news.try_recv().is_err(), "no other news");
}

#[test]
fn a_budget_meets_a_grammar_behind_its_mark() {
    let compiler = Compiler::new(vocabulary()).unwrap();
    let form = Form::Regex("[xy]+".to_owned());
    let constraint = Constraint::new(form, "test").after("!");
    let grammar = Some(compile_with(&compiler, &constraint).unwrap().seed(true));
    let mut bench = Bench::new();
    for (i, (tokens, said, forced)) in
        [(3, "abc", true), (0, "", true), (9, "ab-!", false)].into_iter().enumerate()
    {
        let request = RequestId(i as u64);
        let budget = Some(budget(tokens));
        bench.workers.begin(request, Guide { grammar: grammar.clone(), budget });
        for byte in said.chars() {
            let free = bench.allowed(request);
            assert!(free.is_none_or(|ids| ids.len() > 100), "whatever it thinks");
            bench.say(request, &byte.to_string());
        }
        for byte in ["-", "!"].into_iter().filter(|_| forced) {
            assert_eq!(bench.allowed(request).as_deref(), Some(byte), "{said}");
            bench.say(request, byte);
        }
        assert_eq!(bench.allowed(request).as_deref(), Some("xy"), "{said}");
    }
    assert!(bench.news.try_iter().all(|(_, news)| news != News::Over), "the grammar goes on");
}

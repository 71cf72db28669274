//! Tests of token bitmasks after draft tokens: the bitmasks equal the bitmasks of an output without draft
//! tokens, and computing them does not change the state of the session.

use super::compile::{CompiledGrammar, GrammarCompiler};
use super::decoding_guide::{DecodingGuideState, DraftMasks};
use super::tests::{END, MaskWorkerHarness, budget, compile_with, json_spec, vocabulary};
use super::{DecodingGuide, GrammarSpec, GrammarVocabulary, OutputConstraint};
use proptest::prelude::*;
use protocol::{ExecutorCommand, RequestId, RowDrafts, StepDrafts, StepId, Token, TokenBitmask};
use serde_json::json;
use std::sync::Arc;
use std::time::Duration;

/// Maximum number of tokens of an output.
const TOKENS_MAX: usize = 60;

/// Returns a vocabulary with multi-byte tokens, so that the tokenization of a forced text depends on its
/// start position.
fn merged_vocabulary() -> GrammarVocabulary {
    const MERGED: [&str; 15] = [
        "{\"", "\":", "na", "am", "name", "me\"", "ame\":", "tr", "ue", "true", "va", "alu",
        "lue\"", "12", "abc",
    ];
    let mut vocabulary = vocabulary();
    vocabulary.tokens.extend(MERGED.iter().map(|text| text.as_bytes().to_vec()));
    let tokens = vocabulary.tokens.clone();
    // Greedy tokenization: always takes the longest matching token.
    let encode = move |text: &str| {
        let (mut rest, mut ids) = (text.as_bytes(), Vec::new());
        while !rest.is_empty() {
            let fits = (0..tokens.len()).filter(|&id| id as Token != END);
            let fits = fits.filter(|&id| rest.starts_with(&tokens[id]) && !tokens[id].is_empty());
            let id = fits.max_by_key(|&id| tokens[id].len())?;
            rest = &rest[tokens[id].len()..];
            ids.push(id as Token);
        }
        Some(ids)
    };
    GrammarVocabulary { encode: Arc::new(encode), ..vocabulary }
}

fn specs() -> Vec<GrammarSpec> {
    let object = json!({"type": "object", "additionalProperties": false,
        "properties": {"name": {"type": "string", "maxLength": 6}, "value": {"enum": [true, 12, "abc"]}},
        "required": ["name", "value"]});
    vec![
        json_spec(object),
        json_spec(
            json!({"type": "array", "items": {"type": "integer", "minimum": 3, "maximum": 1234}}),
        ),
        GrammarSpec::Regex("(name|value)[abc]{2,5}(true)?12*".to_owned()),
        GrammarSpec::Choice(vec!["name is true".into(), "name is 12".into(), "value: abc".into()]),
        GrammarSpec::Lark("start: \"<\" x \">\"\nx: /[0-9]/ | start | \"name\" x \"value\"".into()),
        // The matcher of this grammar cannot be rolled back.
        GrammarSpec::Lark("start: a \"name\"\na[max_tokens=5]: /[abc]+/".into()),
    ]
}

fn grammars() -> Vec<CompiledGrammar> {
    let compiler = GrammarCompiler::new(merged_vocabulary()).unwrap();
    let compile = |spec| compile_with(&compiler, &OutputConstraint::new(spec, "test")).unwrap();
    specs().into_iter().map(compile).collect()
}

fn guide(grammar: &CompiledGrammar, reasoning: Option<u32>) -> DecodingGuideState {
    let grammar = Some(grammar.session_seed(false));
    let budget = reasoning.map(budget_of);
    let mut guide = DecodingGuideState::new(DecodingGuide { grammar, budget });
    guide.begin();
    guide
}

fn budget_of(tokens: u32) -> super::ThinkingBudget {
    super::ThinkingBudget { vocab_size: END + 16, ..budget(tokens) }
}

fn allowed_ids(mask: &TokenBitmask) -> Vec<Token> {
    (0..END + 16).filter(|&id| mask.allows(id)).collect()
}

/// Output that a test generates without draft tokens, for comparison.
struct OutputWithoutDrafts {
    tokens: Vec<Token>,
    /// For each token of the output, the mask that was computed before the token.
    masks: Vec<TokenBitmask>,
}

/// Generates an output without drafts.
fn undrafted_output(guide: &mut DecodingGuideState, bits: &[u32]) -> OutputWithoutDrafts {
    let (mut tokens, mut masks) = (Vec::new(), Vec::new());
    for bits in bits {
        let Some(mask) = guide.mask().unwrap() else { break };
        let mask = TokenBitmask::from(mask);
        let ids = allowed_ids(&mask);
        let token = ids[*bits as usize % ids.len()];
        masks.push(mask);
        tokens.push(token);
        if token == END {
            break;
        }
        guide.advance(&[token]).unwrap();
    }
    OutputWithoutDrafts { tokens, masks }
}

/// Returns up to five draft tokens for an output that continues with `tokens`; one of them may be wrong.
fn drafts_with_error(tokens: &[Token], bits: u32) -> Vec<Token> {
    let mut drafts = tokens[..tokens.len().min((bits % 6) as usize)].to_vec();
    let wrong = (bits >> 8) as usize % 8;
    if let Some(draft) = drafts.get_mut(wrong) {
        *draft = (*draft + 1 + (bits >> 16) % 7) % (END + 16);
    }
    drafts
}

/// Repeats an output with draft tokens, most of which are correct, and checks every mask. Returns the number
/// of masks after draft tokens.
fn follow_with_drafts(
    guide: &mut DecodingGuideState,
    OutputWithoutDrafts { tokens, masks }: &OutputWithoutDrafts,
    bits: &[u32],
) -> usize {
    let (mut at, mut draft_masks) = (0, 0);
    for bits in bits {
        let Some(expected) = masks.get(at) else { break };
        let first = TokenBitmask::from(guide.mask().unwrap().unwrap());
        assert!(first == *expected, "mask {at} of {tokens:?}");
        let drafts = drafts_with_error(&tokens[at..], *bits);
        let DraftMasks { bitmasks, .. } = guide.draft_masks(&first, &drafts).unwrap();
        let again = TokenBitmask::from(guide.mask().unwrap().unwrap());
        assert!(again == first, "mask {at} of {tokens:?} after the drafts {drafts:?}");
        let right = drafts.iter().zip(&tokens[at..]).take_while(|(draft, token)| draft == token);
        let right = right.count();
        for (i, mask) in bitmasks.iter().take(right).enumerate() {
            let is_equal = *mask == masks[at + i + 1];
            assert!(is_equal, "mask {i} after the drafts {drafts:?} of {tokens:?}");
        }
        draft_masks += bitmasks.len();
        // A step emits the accepted draft tokens that have masks, plus one token.
        let emitted = right.min(bitmasks.len()) + 1;
        let end = tokens.len().min(at + emitted);
        guide.advance(&tokens[at..end]).unwrap();
        at = end;
    }
    draft_masks
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]

    #[test]
    fn draft_masks_equal_those_without_drafts(
        picks in prop::collection::vec(any::<u32>(), TOKENS_MAX),
        drafts in prop::collection::vec(any::<u32>(), TOKENS_MAX),
        reasoning in prop::option::of(0..4_u32),
    ) {
        for grammar in grammars() {
            let output = undrafted_output(&mut guide(&grammar, reasoning), &picks);
            follow_with_drafts(&mut guide(&grammar, reasoning), &output, &drafts);
        }
    }
}

#[test]
fn each_grammar_has_forced_texts_and_draft_masks() {
    let bits: Vec<u32> =
        (0..TOKENS_MAX as u32).map(|i| i.wrapping_mul(2_654_435_761) | 5).collect();
    for (i, grammar) in grammars().iter().enumerate() {
        let (mut outputs, mut forced, mut found) = (0, 0, 0);
        for first in 0..8 {
            let output = undrafted_output(&mut guide(grammar, None), &bits[first..]);
            outputs += output.tokens.len();
            forced += output.masks.iter().filter(|mask| allowed_ids(mask).len() == 1).count();
            found += follow_with_drafts(&mut guide(grammar, None), &output, &bits);
        }
        let rolls_back = i + 1 < specs().len();
        let counts = format!("grammar {i}: {outputs} tokens, {forced} forced, {found} masks");
        assert!(found > 0 && forced > 0 && (!rolls_back || 2 * found > outputs), "{counts}");
    }
}

#[test]
fn failed_rollback_ends_drafts_but_not_the_output() {
    let grammar = grammars().pop().unwrap();
    let mut guide = guide(&grammar, None);
    let ids = |text: &str| -> Vec<Token> { text.bytes().map(Token::from).collect() };
    let mask = |guide: &mut DecodingGuideState| TokenBitmask::from(guide.mask().unwrap().unwrap());
    guide.advance(&ids("ab")).unwrap();
    let first = mask(&mut guide);
    let masks = guide.draft_masks(&first, &ids("ca")).unwrap();
    assert!(masks.bitmasks.len() == 2 && masks.cancellation.is_some(), "a new matcher");
    assert!(mask(&mut guide) == first);
    let masks = guide.draft_masks(&first, &ids("ca")).unwrap();
    assert!(masks.bitmasks.is_empty() && masks.cancellation.is_none(), "no more drafts");
    guide.advance(&ids("c")).unwrap();
    let mut undrafted = self::guide(&grammar, None);
    undrafted.advance(&ids("abc")).unwrap();
    assert!(mask(&mut guide) == mask(&mut undrafted));
}

#[test]
fn drafts_end_at_the_first_disallowed_token_and_at_the_end() {
    let compiler = GrammarCompiler::new(vocabulary()).unwrap();
    let constraint = OutputConstraint::new(GrammarSpec::Regex("a[bc]?".to_owned()), "test");
    let grammar = compile_with(&compiler, &constraint).unwrap();
    let mut guide = guide(&grammar, None);
    let first = TokenBitmask::from(guide.mask().unwrap().unwrap());
    let mut count = |drafts: &[Token]| guide.draft_masks(&first, drafts).unwrap().bitmasks.len();
    let [a, b, c] = [b'a', b'b', b'c'].map(Token::from);
    assert_eq!([count(&[b, a]), count(&[a, a]), count(&[a, b]), count(&[a, b, c])], [0, 1, 2, 2]);
    assert_eq!([count(&[a, END, b]), count(&[a, b, END, END])], [1, 2], "no mask after the end");
    assert_eq!(count(&[a, 1 << 30]), 1, "an id outside the vocabulary");
}

#[test]
fn step_gets_masks_after_reported_drafts() {
    let compiler = GrammarCompiler::new(vocabulary()).unwrap();
    let constraint = OutputConstraint::new(GrammarSpec::Regex("a[bc]+d".to_owned()), "test");
    let grammar = Some(compile_with(&compiler, &constraint).unwrap().session_seed(false));
    let mut harness = MaskWorkerHarness::new();
    let request = RequestId(3);
    harness.workers.begin(request, DecodingGuide { grammar, budget: None });
    let ids = |text: &str| -> Vec<Token> { text.bytes().map(Token::from).collect() };
    let report = |step, drafts: &str| StepDrafts {
        step: StepId(step),
        rows: vec![RowDrafts { request, tokens: ids(drafts).into() }],
    };
    let masks = |harness: &mut MaskWorkerHarness, step, drafts: Option<&str>, expected| {
        harness.request(StepId(step), request, true, expected);
        harness.workers.report_drafts(report(step + 9, "a")); // A report for another step.
        if let Some(drafts) = drafts {
            harness.workers.report_drafts(report(step, drafts));
        }
        let sent = harness.commands.recv_timeout(MaskWorkerHarness::WAIT).unwrap();
        let ExecutorCommand::Bitmask(mut sent) = sent else { panic!("expected bitmasks") };
        assert_eq!((sent.step, sent.rows.len()), (StepId(step), 1));
        let text = |mask: &TokenBitmask| -> String {
            let ids = (0..END).filter(|&id| mask.allows(id));
            ids.map(|id| char::from(id as u8)).collect()
        };
        sent.rows.remove(0).bitmasks.iter().map(text).collect::<Vec<String>>()
    };
    let wait = MaskWorkerHarness::WAIT;
    assert_eq!(masks(&mut harness, 1, Some("abdb"), wait), ["a", "bc", "bcd", ""]);
    assert_eq!(masks(&mut harness, 2, Some(""), wait), ["a"], "no draft was found");
    assert_eq!(masks(&mut harness, 3, Some("ba"), wait), ["a"], "no draft is allowed");
    assert_eq!(
        masks(&mut harness, 4, None, Duration::from_millis(1)),
        ["a"],
        "the report is overdue"
    );
    harness.commit_text(request, "ab");
    assert_eq!(masks(&mut harness, 5, Some("cd"), wait), ["bcd", "bcd", ""]);
}

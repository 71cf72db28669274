//! Tests of the JSON forms of log-probabilities.

use super::super::logprob_values::{chat, entries, names, prompt, text};
use super::*;

fn written(format: LogprobsFormat, names: &TokenFormatter, logprobs: ChoiceLogprobs<'_>) -> String {
    let mut out = BytesMut::new();
    LogprobListWriter::new(format, 0).write(names, logprobs, &mut out);
    String::from_utf8(out.to_vec()).unwrap()
}

#[test]
fn lists_equal_serialised_values() {
    for token_format in [TokenFormat::Text, TokenFormat::Id] {
        let names = names(token_format);
        for (top, count) in [(0, 3), (1, 1), (20, 9), (20, 0)] {
            let (output, prompt_logprobs) = (entries(count, top), entries(count + 2, top));
            let logprobs =
                ChoiceLogprobs { echoed: &[], prompt: &prompt_logprobs, output: &output };
            assert_eq!(
                written(LogprobsFormat::Chat, &names, logprobs),
                chat(&names, logprobs).to_string()
            );
            assert_eq!(
                written(LogprobsFormat::Text, &names, logprobs),
                text(&names, logprobs).to_string()
            );
            assert_eq!(
                written(LogprobsFormat::Prompt, &names, logprobs),
                prompt(&names, logprobs).to_string()
            );
            let ids: Vec<Token> = (0..count as Token + 3).collect();
            let logprobs = ChoiceLogprobs { echoed: &ids, ..logprobs };
            assert_eq!(
                written(LogprobsFormat::Text, &names, logprobs),
                text(&names, logprobs).to_string()
            );
        }
    }
}

#[test]
fn text_offsets_do_not_depend_on_the_token_format() {
    let output = entries(6, 0);
    let part = ChoiceLogprobs { output: &output, ..ChoiceLogprobs::default() };
    let offsets = |token_format| {
        let lists = written(LogprobsFormat::Text, &names(token_format), part);
        serde_json::from_str::<Value>(&lists).unwrap()["text_offset"].clone()
    };
    assert_eq!(offsets(TokenFormat::Id), offsets(TokenFormat::Text));
}

#[test]
fn text_offsets_count_a_split_character_once() {
    let names = names(TokenFormat::Text);
    let of = |text: &str| -> usize {
        text.bytes()
            .map(|byte| {
                let token = (0..names.tokenizer.vocab_size() as Token)
                    .find(|&token| names.tokenizer.token_bytes(token) == [byte]);
                names.text_chars(token.unwrap())
            })
            .sum()
    };
    assert_eq!(of("é日😀x"), 4);
}

#[test]
fn text_offsets_continue_across_lists() {
    let (names, output) = (names(TokenFormat::Text), entries(6, 0));
    let mut out = BytesMut::new();
    let part = |output| ChoiceLogprobs { output, ..ChoiceLogprobs::default() };
    let before =
        LogprobListWriter::new(LogprobsFormat::Text, 0).write(&names, part(&output[..4]), &mut out);
    out.clear();
    LogprobListWriter::new(LogprobsFormat::Text, before).write(
        &names,
        part(&output[4..]),
        &mut out,
    );
    let lists: Value = serde_json::from_slice(&out).unwrap();
    let expected = text(&names, part(&output));
    assert_eq!(lists["text_offset"][1], expected["text_offset"][5]);
}

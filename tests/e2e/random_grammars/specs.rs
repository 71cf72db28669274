//! Hostile grammars drawn from a seed: nested, recursive, contradictory, and large.

use crate::hostile_grammars::json_spec;
use crate::rng::SimRng;
use grammar::{GrammarSpec, TEXT_BYTES_MAX};
use serde_json::{Map, Value, json};
use std::fmt::Write as _;

/// Maximum nesting depth.
const DEPTH: u32 = 7;

/// A grammar of a seed.
pub(super) fn random_spec(chance: &mut SimRng) -> GrammarSpec {
    match chance.below(8) {
        0..=2 => GrammarSpec::Regex(cut(regex(chance, DEPTH))),
        3 => GrammarSpec::Regex(cut(repeated(chance))),
        4 | 5 => GrammarSpec::Lark(cut(lark(chance))),
        _ => {
            let mut schema = schema(chance, DEPTH);
            let defs: Map<String, Value> =
                (0..4).map(|i| (format!("d{i}"), self::schema(chance, 3))).collect();
            if let Some(object) = schema.as_object_mut() {
                object.insert("$defs".to_owned(), Value::Object(defs));
            }
            json_spec(schema)
        }
    }
}

/// One of many distinct harmless schemas.
pub(super) fn harmless_spec(number: u64) -> GrammarSpec {
    json_spec(
        json!({"type": "object", "additionalProperties": false, "required": ["a"], "properties": {
        "a": {"enum": [format!("v{number}"), number]},
        format!("k{number}"): {"type": "array", "items": {"type": "integer"}, "maxItems": number % 7}}}),
    )
}

/// Truncates a text to the server's maximum size.
fn cut(mut text: String) -> String {
    let end = (0..=TEXT_BYTES_MAX.min(text.len())).rev().find(|&at| text.is_char_boundary(at));
    text.truncate(end.unwrap_or(0));
    text
}

const ATOMS: [&str; 16] = [
    "a",
    "b",
    "ab",
    ".",
    "[a-z]",
    "[^a]",
    r"\p{L}",
    r"\d",
    r"\w+",
    r"\s*",
    "(?i:k)",
    "\u{1f98a}",
    "[\u{0}-\u{10ffff}]",
    r"\b",
    "^",
    "()",
];

fn regex(chance: &mut SimRng, depth: u32) -> String {
    if depth == 0 {
        return chance.pick(&ATOMS).to_owned();
    }
    let mut below = || regex(chance, depth - 1);
    let (a, b) = (below(), below());
    match chance.below(8) {
        0 => format!("({a}|{b})"),
        1 => format!("{a}{b}"),
        2 => format!("({a})*{b}"),
        3 => format!("({a}){{{},{}}}", chance.scaled(1, 40), chance.scaled(40, 2_000)),
        4 => format!("({a}?){{{}}}", chance.scaled(1, 3_000)),
        5 => format!("({a}|{a}{b})+"),
        6 => format!("(?:{a}){{{}}}{b}", chance.scaled(1, 100_000)),
        _ => a,
    }
}

/// A few constructs repeated very often.
fn repeated(chance: &mut SimRng) -> String {
    let times = chance.scaled(1, 20_000) as usize;
    match chance.below(5) {
        0 => format!("{}a{}", "(".repeat(times), ")*".repeat(times)),
        1 => "a?".repeat(times) + &"a".repeat(times),
        2 => (0..times).map(|i| format!("x{i}y")).collect::<Vec<_>>().join("|"),
        3 => format!("({})*z{{{times}}}", "(a|aa|b)".repeat(times % 300)),
        _ => "(".repeat(times),
    }
}

fn lark(chance: &mut SimRng) -> String {
    let rules = chance.scaled(1, 400);
    let mut text = String::from("start: r0\n");
    for rule in 0..rules {
        let _ = write!(text, "r{rule}: ");
        for alternative in 0..chance.between(1, 4) {
            text.push_str(if alternative > 0 { " | " } else { "" });
            for _ in 0..chance.between(0, 4) {
                let other = chance.below(u64::from(rules));
                let symbol = match chance.below(6) {
                    0 => format!("r{rule} "),
                    1 | 2 => format!("r{other}{} ", chance.pick(&["", "", "?", "*", "+"])),
                    3 => format!("/{}/ ", regex(chance, 2).replace('/', "")),
                    4 => format!(
                        "\"{}\"{{1,{}}} ",
                        chance.pick(&["a", "b"]),
                        chance.scaled(1, 500_000)
                    ),
                    _ => format!("\"{}\" ", chance.pick(&["x", "yy", "a"])),
                };
                text.push_str(&symbol);
            }
        }
        text.push('\n');
    }
    text
}

fn schema(chance: &mut SimRng, depth: u32) -> Value {
    if depth == 0 {
        return leaf(chance);
    }
    let many = chance.between(1, 3);
    let mut list = || -> Vec<Value> { (0..many).map(|_| schema(chance, depth - 1)).collect() };
    match list() {
        of if chance.chance_per_mille(150) => json!({"anyOf": of}),
        of if chance.chance_per_mille(150) => json!({"oneOf": of}),
        of if chance.chance_per_mille(200) => json!({"allOf": of}),
        of if chance.chance_per_mille(300) => {
            let least = chance.scaled(1, 2_000_000);
            json!({"type": "array", "items": of[0], "prefixItems": of, "minItems": least, "maxItems": least})
        }
        of => {
            let name = |i: usize| format!("k{i}");
            let properties: Map<String, Value> =
                of.into_iter().enumerate().map(|(i, value)| (name(i), value)).collect();
            let required: Vec<String> = (0..chance.between(0, 4) as usize).map(name).collect();
            let more = chance.chance_per_mille(500);
            json!({"type": "object", "properties": properties, "required": required, "additionalProperties": more})
        }
    }
}

fn leaf(chance: &mut SimRng) -> Value {
    let number = chance.scaled(1, 1_000_000_000);
    match chance.below(10) {
        0 => json!({"$ref": format!("#/$defs/d{}", chance.below(5))}),
        1 => json!({"$ref": "#"}),
        2 => json!({"type": "string", "pattern": regex(chance, 3)}),
        3 => {
            json!({"type": "string", "minLength": number, "maxLength": chance.scaled(1, 1_000_000_000)})
        }
        4 => json!({"type": "integer", "multipleOf": number}),
        5 => json!({"type": "number", "minimum": -f64::from(number), "exclusiveMaximum": 1e-9}),
        6 => json!({"enum": (0..chance.scaled(1, 3_000)).collect::<Vec<u32>>()}),
        7 => {
            json!({"type": "string", "format": chance.pick(&["date-time", "email", "uuid", "ipv6", "nothing"])})
        }
        8 => json!({"not": {"type": "null"}}),
        _ => json!({"const": {"a": [null, number, "\u{0}"]}}),
    }
}

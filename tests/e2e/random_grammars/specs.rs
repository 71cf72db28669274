//! Hostile grammars drawn from a seed: nested, recursive, contradictory, and large.

use crate::hostile_grammars::json_spec;
use crate::rng::SimRng;
use grammar::{GrammarSpec, TEXT_BYTES_MAX};
use serde_json::{Map, Value, json};
use std::fmt::Write as _;

/// Maximum nesting depth of a schema.
const DEPTH: u32 = 7;

/// A hostile grammar drawn from `rng`.
pub(super) fn random_spec(rng: &mut SimRng) -> GrammarSpec {
    match rng.below(8) {
        0..=2 => GrammarSpec::Regex(cut(regex(rng, DEPTH))),
        3 => GrammarSpec::Regex(cut(repeated(rng))),
        4 | 5 => GrammarSpec::Lark(cut(lark(rng))),
        _ => {
            let mut schema = schema(rng, DEPTH);
            let defs: Map<String, Value> =
                (0..4).map(|i| (format!("d{i}"), self::schema(rng, 3))).collect();
            if let Some(object) = schema.as_object_mut() {
                object.insert("$defs".to_owned(), Value::Object(defs));
            }
            json_spec(schema)
        }
    }
}

/// Harmless schema number `number`; all are distinct.
pub(super) fn harmless_spec(number: u64) -> GrammarSpec {
    json_spec(
        json!({"type": "object", "additionalProperties": false, "required": ["a"], "properties": {
        "a": {"enum": [format!("v{number}"), number]},
        format!("k{number}"): {"type": "array", "items": {"type": "integer"}, "maxItems": number % 7}}}),
    )
}

/// Truncates a text to the server's maximum grammar size.
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

fn regex(rng: &mut SimRng, depth: u32) -> String {
    if depth == 0 {
        return rng.pick(&ATOMS).to_owned();
    }
    let mut below = || regex(rng, depth - 1);
    let (a, b) = (below(), below());
    match rng.below(8) {
        0 => format!("({a}|{b})"),
        1 => format!("{a}{b}"),
        2 => format!("({a})*{b}"),
        3 => format!("({a}){{{},{}}}", rng.scaled(1, 40), rng.scaled(40, 2_000)),
        4 => format!("({a}?){{{}}}", rng.scaled(1, 3_000)),
        5 => format!("({a}|{a}{b})+"),
        6 => format!("(?:{a}){{{}}}{b}", rng.scaled(1, 100_000)),
        _ => a,
    }
}

/// A regular expression that repeats a few constructs very often.
fn repeated(rng: &mut SimRng) -> String {
    let times = rng.scaled(1, 20_000) as usize;
    match rng.below(5) {
        0 => format!("{}a{}", "(".repeat(times), ")*".repeat(times)),
        1 => "a?".repeat(times) + &"a".repeat(times),
        2 => (0..times).map(|i| format!("x{i}y")).collect::<Vec<_>>().join("|"),
        3 => format!("({})*z{{{times}}}", "(a|aa|b)".repeat(times % 300)),
        _ => "(".repeat(times),
    }
}

fn lark(rng: &mut SimRng) -> String {
    let rules = rng.scaled(1, 400);
    let mut text = String::from("start: r0\n");
    for rule in 0..rules {
        let _ = write!(text, "r{rule}: ");
        for alternative in 0..rng.between(1, 4) {
            text.push_str(if alternative > 0 { " | " } else { "" });
            for _ in 0..rng.between(0, 4) {
                let other = rng.below(u64::from(rules));
                let symbol = match rng.below(6) {
                    0 => format!("r{rule} "),
                    1 | 2 => format!("r{other}{} ", rng.pick(&["", "", "?", "*", "+"])),
                    3 => format!("/{}/ ", regex(rng, 2).replace('/', "")),
                    4 => format!("\"{}\"{{1,{}}} ", rng.pick(&["a", "b"]), rng.scaled(1, 500_000)),
                    _ => format!("\"{}\" ", rng.pick(&["x", "yy", "a"])),
                };
                text.push_str(&symbol);
            }
        }
        text.push('\n');
    }
    text
}

fn schema(rng: &mut SimRng, depth: u32) -> Value {
    if depth == 0 {
        return leaf(rng);
    }
    let many = rng.between(1, 3);
    let mut list = || -> Vec<Value> { (0..many).map(|_| schema(rng, depth - 1)).collect() };
    match list() {
        of if rng.chance_per_mille(150) => json!({"anyOf": of}),
        of if rng.chance_per_mille(150) => json!({"oneOf": of}),
        of if rng.chance_per_mille(200) => json!({"allOf": of}),
        of if rng.chance_per_mille(300) => {
            let least = rng.scaled(1, 2_000_000);
            json!({"type": "array", "items": of[0], "prefixItems": of, "minItems": least, "maxItems": least})
        }
        of => {
            let name = |i: usize| format!("k{i}");
            let properties: Map<String, Value> =
                of.into_iter().enumerate().map(|(i, value)| (name(i), value)).collect();
            let required: Vec<String> = (0..rng.between(0, 4) as usize).map(name).collect();
            let more = rng.chance_per_mille(500);
            json!({"type": "object", "properties": properties, "required": required, "additionalProperties": more})
        }
    }
}

fn leaf(rng: &mut SimRng) -> Value {
    let number = rng.scaled(1, 1_000_000_000);
    match rng.below(10) {
        0 => json!({"$ref": format!("#/$defs/d{}", rng.below(5))}),
        1 => json!({"$ref": "#"}),
        2 => json!({"type": "string", "pattern": regex(rng, 3)}),
        3 => {
            json!({"type": "string", "minLength": number, "maxLength": rng.scaled(1, 1_000_000_000)})
        }
        4 => json!({"type": "integer", "multipleOf": number}),
        5 => json!({"type": "number", "minimum": -f64::from(number), "exclusiveMaximum": 1e-9}),
        6 => json!({"enum": (0..rng.scaled(1, 3_000)).collect::<Vec<u32>>()}),
        7 => {
            json!({"type": "string", "format": rng.pick(&["date-time", "email", "uuid", "ipv6", "nothing"])})
        }
        8 => json!({"not": {"type": "null"}}),
        _ => json!({"const": {"a": [null, number, "\u{0}"]}}),
    }
}

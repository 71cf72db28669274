//! Tests with random number keywords: each schema must be rejected with an error that names the keyword or be
//! enforced exactly, and the compiler must never panic.

use super::compile::{GrammarCompiler, GrammarError};
use super::tests::{END, compile_with, json_spec, vocabulary};
use super::{GrammarSession, OutputConstraint};
use protocol::Token;
use serde_json::{Map, Number, Value, json};

const SCHEMAS: u64 = 1_500;
const TEXTS: u64 = 3;
const TEXT_BYTES_MAX: u64 = 60;
const KEYWORDS: [&str; 8] = [
    "multipleOf",
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "const",
    "minItems",
    "maxLength",
];

const EDGE_VALUES: [f64; 14] = [
    1e-9,
    1e-308,
    5e-324,
    1e308,
    f64::MAX,
    0.0,
    -0.0,
    -1e-9,
    -1e308,
    0.07,
    0.1,
    1e17,
    1e18,
    9.3e18,
];
const EDGE_INTEGERS: [i64; 6] =
    [i64::MAX, i64::MIN, (1 << 53) + 1, -(1 << 53) - 1, 1_000_000_000_000_000_000, 0];

/// Seeded random number generator (splitmix64).
struct NumberSchemaRng(u64);

impl NumberSchemaRng {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (x ^ (x >> 31)) % bound
    }

    fn number(&mut self) -> Value {
        match self.below(6) {
            0 => json!(EDGE_VALUES[self.below(EDGE_VALUES.len() as u64) as usize]),
            1 => json!(EDGE_INTEGERS[self.below(EDGE_INTEGERS.len() as u64) as usize]),
            2 => json!(self.below(u64::MAX)),
            3 => json!(self.below(20) as i64 - 10),
            4 => {
                let exponent = self.below(40) as i32 - 20;
                json!(self.below(1_000) as f64 * 10_f64.powi(exponent))
            }
            _ => json!((self.below(2_000) as f64 - 1_000.0) / 100.0),
        }
    }

    fn schema(&mut self, depth: u32) -> Value {
        let mut schema = Map::new();
        if self.below(3) > 0 {
            let kind = ["integer", "number"][self.below(2) as usize];
            schema.insert("type".to_owned(), json!(kind));
        }
        for _ in 0..=self.below(3) {
            let keyword = KEYWORDS[self.below(KEYWORDS.len() as u64) as usize];
            schema.insert(keyword.to_owned(), self.number());
        }
        if depth > 0 && self.below(4) == 0 {
            let parts = json!([self.schema(depth - 1), self.schema(depth - 1)]);
            schema.insert(["allOf", "anyOf"][self.below(2) as usize].to_owned(), parts);
        }
        Value::Object(schema)
    }
}

/// Generates a random text of the grammar; `None` if it does not end within `TEXT_BYTES_MAX` bytes.
fn random_text(session: &mut GrammarSession, rng: &mut NumberSchemaRng) -> Option<String> {
    let mut text = String::new();
    for _ in 0..TEXT_BYTES_MAX {
        let mask = session.mask()?;
        let ids: Vec<Token> =
            (0..=END).filter(|id| mask[*id as usize / 32] >> (id % 32) & 1 == 1).collect();
        if ids.contains(&END) && (ids.len() == 1 || rng.below(3) == 0) {
            return Some(text);
        }
        let choices: Vec<&Token> = ids.iter().filter(|id| **id != END).collect();
        let id = *choices[rng.below(choices.len() as u64) as usize];
        text.push(char::from(id as u8));
        session.advance(&[id]);
    }
    None
}

/// Returns the coefficient and the number of decimal places of a number; `None` if its exponent is too large.
fn decimal(text: &str) -> Option<(i128, u32)> {
    let (mantissa, exponent) = text.split_once(['e', 'E']).unwrap_or((text, "0"));
    let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
    let places = fraction.len() as i32 - exponent.parse::<i32>().ok()?;
    let coefficient: i128 = format!("{whole}{fraction}").parse().ok()?;
    let shift = 10_i128.checked_pow(u32::try_from(-places.min(0)).ok()?)?;
    Some((coefficient.checked_mul(shift)?, places.max(0) as u32))
}

/// Whether a number is a multiple of `divisor`, computed without rounding; `None` if the numbers have too
/// many digits.
fn is_multiple(text: &str, divisor: &Number) -> Option<bool> {
    let ((a, a_places), (b, b_places)) = (decimal(text)?, decimal(&divisor.to_string())?);
    let places = a_places.max(b_places);
    let scaled = |value: i128, from: u32| value.checked_mul(10_i128.checked_pow(places - from)?);
    Some(scaled(a, a_places)?.checked_rem(scaled(b, b_places)?)? == 0)
}

/// Whether a schema accepts a number, with `multipleOf` checked in exact arithmetic.
fn is_accepted(schema: &Value, text: &str) -> bool {
    let mut remaining = schema.clone();
    if let Some(divisor) = remaining["multipleOf"].as_number()
        && is_multiple(text, divisor) != Some(false)
    {
        remaining.as_object_mut().unwrap().remove("multipleOf");
    }
    for keyword in ["allOf", "anyOf"] {
        if let Some(parts) = remaining.as_object_mut().unwrap().remove(keyword) {
            let parts = parts.as_array().unwrap().clone();
            let mut accepted = parts.iter().map(|part| is_accepted(part, text));
            if !(if keyword == "allOf" { accepted.all(|it| it) } else { accepted.any(|it| it) }) {
                return false;
            }
        }
    }
    // Numbers with three-digit exponents may not parse as doubles. They count as accepted, because they occur
    // only where no bound applies.
    serde_json::from_str(text).map_or(true, |value| jsonschema::is_valid(&remaining, &value))
}

/// Whether a schema was rejected for a keyword, for its size, or because it accepts no value.
fn names_the_cause(error: &GrammarError) -> bool {
    let message = error.to_string();
    let named = KEYWORDS.iter().any(|keyword| message.contains(keyword))
        || message.starts_with("the schema accepts no value")
        || message.starts_with("the grammar ")
        || matches!(error, GrammarError::TooLarge { .. });
    named && !matches!(error, GrammarError::Failed { .. })
}

#[test]
fn random_number_keywords_are_exact_or_rejected() {
    let compiler = GrammarCompiler::new(vocabulary()).unwrap();
    let mut rng = NumberSchemaRng(7);
    let (mut followed, mut rejected) = (0, 0);
    for _ in 0..SCHEMAS {
        let schema = rng.schema(1);
        let constraint = OutputConstraint::new(json_spec(schema.clone()), "test");
        match compile_with(&compiler, &constraint) {
            Ok(compiled) => {
                followed += 1;
                for _ in 0..TEXTS {
                    let mut session = compiled.session_seed(false).session();
                    if let Some(text) = random_text(&mut session, &mut rng) {
                        assert!(is_accepted(&schema, &text), "{schema} does not accept {text}");
                    }
                }
            }
            Err(error) => {
                rejected += 1;
                assert!(names_the_cause(&error), "{schema}: {error:?}");
            }
        }
    }
    println!("{followed} followed, {rejected} rejected");
    assert!(followed > SCHEMAS / 10 && rejected > SCHEMAS / 10);
}

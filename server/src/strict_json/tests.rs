//! Tests of accepted and rejected JSON texts.

use super::visitor::VALUES_MAX;
use super::*;

fn rejection(body: &str) -> (Option<String>, String) {
    let error = JsonValue::parse(body.as_bytes()).expect_err("must be rejected");
    (error.param, error.message)
}

#[test]
fn json_value_kinds_are_preserved() {
    let body = br#"{"a":[1,2],"b":[1,"x"],"c":[],"d":18446744073709551615,"e":-0.5,"f":null}"#;
    let JsonValue::Object(pairs) = JsonValue::parse(body).unwrap() else { panic!("an object") };
    let values: Vec<_> = pairs.into_iter().map(|(_, value)| value).collect();
    let mixed = JsonValue::List(vec![JsonValue::Int(1), JsonValue::Str("x".into())]);
    let expected = [
        JsonValue::Ints(vec![1, 2]),
        mixed,
        JsonValue::List(vec![]),
        JsonValue::LargeInt("18446744073709551615".to_owned()),
        JsonValue::Float(-0.5),
        JsonValue::Null,
    ];
    assert_eq!(values, expected);
}

#[test]
fn integers_of_any_size_keep_their_digits() {
    let large = format!("-{}", "1234567890".repeat(40));
    let body = format!(r#"{{"a":[{large},-0,1e25],"b":"{large}","c":{{"d":{large}}}}}"#);
    let value = JsonValue::parse(body.as_bytes()).unwrap();
    let float = value.clone().into_value()["a"].clone();
    assert_eq!(float, serde_json::json!([f64::MIN, 0, 1e25]));
    let JsonValue::Object(pairs) = value else { panic!("an object") };
    let number = JsonValue::LargeInt(large.clone());
    let list = [number.clone(), JsonValue::Int(0), JsonValue::Float(1e25)];
    assert_eq!(pairs[0].1, JsonValue::List(list.into()));
    assert_eq!(pairs[1].1, JsonValue::Str(large.clone()));
    assert_eq!(pairs[2].1, JsonValue::Object(vec![("d".to_owned(), number.clone())]));
    assert_eq!(number.into_template_value(), template_integer(&large));
}

#[test]
fn large_integers_do_not_change_errors() {
    let large = "123456789012345678901";
    let (param, message) = rejection(&format!(r#"{{"a":{large},"b":tru}}"#));
    assert_eq!(param.as_deref(), Some("b"));
    assert!(message.ends_with("at line 1 column 35"), "{message}");
    let digits = "7".repeat(4_301);
    assert!(rejection(&digits).1.contains("a number is too large"));
    assert!(JsonValue::parse(&digits.as_bytes()[1..]).is_ok());
}

#[test]
fn validation_errors_name_the_field() {
    assert_eq!(rejection(r#"{"temperature":NaN}"#).0.as_deref(), Some("temperature"));
    assert_eq!(rejection(r#"{"temperature":1e999}"#).0.as_deref(), Some("temperature"));
    assert_eq!(rejection(r#"{"a":1,"a":2}"#).0.as_deref(), Some("a"));
    let nested = r#"{"messages":[{"role":"user"},{"content":tru}]}"#;
    assert_eq!(rejection(nested).0.as_deref(), Some("messages[1].content"));
    assert_eq!(rejection("[1] x").0, None);
    let keys: String =
        (0..40).flat_map(|i| ["\"k".into(), i.to_string(), "\":0,".into()]).collect();
    let duplicate = format!("{{{keys}\"k3\":1}}");
    assert_eq!(rejection(&duplicate).0.as_deref(), Some("k3"));
}

#[test]
fn json_errors_are_our_own_texts_with_a_position() {
    for (body, expected) in [
        ("{", "the text ends too early"),
        ("[1,", "the text ends too early"),
        ("[1 2]", "a comma or a bracket is missing"),
        ("{\"a\" 1}", "a colon is missing"),
        ("{\"a\":1 2}", "a comma or a brace is missing"),
        ("nul", "the text ends too early"),
        ("nulx", "a word is neither true nor false nor null"),
        ("?", "a value is missing"),
        ("1e999", "a number is too large"),
        ("01", "a number is malformed"),
        ("\"\\q\"", "a string has an unknown escape sequence"),
        ("\"\\ud800\"", "a string has an incomplete escape sequence"),
        ("\"\u{1}\"", "a character below U+0020 is not escaped"),
        ("{1:2}", "a key has no quotation marks"),
        ("[1]]", "more text follows than is allowed"),
        ("[1,]", "more text follows than is allowed"),
    ] {
        let message = rejection(body).1;
        let start = format!("the body is not valid JSON: {expected} at line 1 column ");
        assert!(message.starts_with(&start), "{body}: {message}");
        let copied = SYNTAX_ERRORS.iter().find(|known| message.contains(known.prefix));
        assert!(copied.is_none(), "{message}");
    }
    use serde::de::Error as _;
    let internal = serde_json::Error::custom("panicked at src/lib.rs");
    assert_eq!(client_message(&internal), "line 0 column 0");
}

#[test]
fn depth_and_size_are_limited() {
    let (deep, message) = rejection(&"[".repeat(200));
    assert!(message.contains("nested too deeply"));
    let deep = deep.unwrap();
    assert!(deep.starts_with("[0][0]") && deep.ends_with("...") && deep.len() < 262, "{deep}");
    let wide = format!("[{}0.5]", "0.5,".repeat(VALUES_MAX as usize));
    assert!(rejection(&wide).1.contains("values"));
    let ids = format!("[{}7]", "7,".repeat(2 * VALUES_MAX as usize));
    assert!(matches!(JsonValue::parse(ids.as_bytes()), Ok(JsonValue::Ints(_))));
}

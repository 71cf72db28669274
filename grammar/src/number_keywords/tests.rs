//! Tests of rewritten number keywords.

use super::*;
use serde_json::json;

fn prepared(schema: Value) -> Result<Value, String> {
    let mut schema = schema;
    prepare(&mut schema).map(|()| schema).map_err(|error| error.to_string())
}

#[test]
fn multiples_are_followed_or_rejected_by_name() {
    for fits in [json!(1e-8), json!(0.07), json!(0.25), json!(7), json!(5_000_000), json!(1.1)] {
        let schema = prepared(json!({"multipleOf": fits})).unwrap();
        let double = schema["multipleOf"].as_f64().unwrap();
        let decimal = DecimalNumber::from_number(fits.as_number().unwrap());
        assert_eq!(DecimalNumber::as_read_by_library(double), decimal, "{fits}");
    }
    for (value, why) in [
        (json!(1e308), "has too many digits"),
        (json!(u64::MAX), "has too many digits"),
        (json!(4_000_000_000_u64), "has too many digits"),
        (json!(0), "must be greater than 0, got 0"),
        (json!(-0.5), "must be greater than 0, got -0.5"),
    ] {
        let message = prepared(json!({"items": [{"multipleOf": value}]})).unwrap_err();
        assert!(message.starts_with("multipleOf ") && message.contains(why), "{value}: {message}");
    }
}

#[test]
fn multiples_with_many_places_become_coarser() {
    for (fine, coarse) in
        [(json!(1e-9), 1e-8), (json!(2.5e-11), 25e-8), (json!(1e-308), 1e-8), (json!(5e-324), 5e-8)]
    {
        let schema = prepared(json!({"multipleOf": fine})).unwrap();
        assert_eq!(schema["multipleOf"].as_f64(), Some(coarse), "{fine}");
    }
    let both = json!({"allOf": [{"multipleOf": 1e-9}, {"multipleOf": 1e-12}]});
    assert!(prepared(both).is_ok());
}

#[test]
fn bounds_are_moved_inwards_or_rejected_by_name() {
    let bound_max = BOUND_MAX as f64;
    let adjusted = |keyword: &str, value: Value| {
        prepared(json!({ keyword: value })).map(|schema| schema[keyword].clone())
    };
    assert_eq!(adjusted("maximum", json!(i64::MAX)), Ok(json!(bound_max)));
    assert_eq!(adjusted("minimum", json!(i64::MIN)), Ok(json!(-bound_max)));
    assert_eq!(adjusted("exclusiveMaximum", json!(1e308)), Ok(json!(bound_max)));
    assert_eq!(adjusted("minimum", json!(1)), Ok(json!(1)));
    let odd = (1_i64 << 53) + 1;
    assert_eq!(adjusted("minimum", json!(odd)), Ok(json!((odd + 1) as f64)));
    assert_eq!(adjusted("maximum", json!(odd)), Ok(json!(odd)), "read as the double below");
    let even = (odd - 1) as f64;
    assert_eq!(adjusted("exclusiveMinimum", json!(odd - 1)), Ok(json!(even.next_up())));
    assert_eq!(adjusted("exclusiveMaximum", json!(odd - 1)), Ok(json!(even.next_down())));
    for (keyword, value) in [
        ("minimum", json!(1e300)),
        ("exclusiveMinimum", json!(u64::MAX)),
        ("maximum", json!(-1e18)),
        ("minimum", json!(1e-300)),
        ("const", json!(odd)),
        ("const", json!(1e308)),
        ("enum", json!([1, {"a": u64::MAX}])),
    ] {
        let message = adjusted(keyword, value.clone()).unwrap_err();
        assert!(message.starts_with(keyword), "{keyword} {value}: {message}");
    }
}

#[test]
fn counts_are_integers_or_rejected_by_name() {
    assert_eq!(prepared(json!({"minItems": 2.0})), Ok(json!({"minItems": 2})));
    assert_eq!(prepared(json!({"maxLength": 1e300})), Ok(json!({"maxLength": COUNT_MAX})));
    assert!(prepared(json!({"minItems": u64::MAX})).unwrap_err().starts_with("minItems "));
    for value in [json!(-1), json!(0.5), json!(-1e300)] {
        let message = prepared(json!({"maxLength": value})).unwrap_err();
        assert!(message.starts_with("maxLength must be a non-negative integer"), "{message}");
    }
}

#[test]
fn data_and_property_names_are_not_keywords() {
    let schema = json!({"default": {"multipleOf": 0}, "properties": {
        "multipleOf": {"type": "string"}, "default": {"type": "integer"}}});
    assert_eq!(prepared(schema.clone()), Ok(schema));
    let named = json!({"properties": {"default": {"multipleOf": 0}}});
    assert!(prepared(named).is_err());
}

#[test]
fn multiples_that_apply_together_must_fit_together() {
    let both = |a: u32, b: u32| json!({"allOf": [{"multipleOf": a}, {"multipleOf": b}]});
    assert!(prepared(both(6, 4)).is_ok());
    assert!(prepared(both(100_000, 100_000)).is_err());
    let apart = json!({"anyOf": [{"multipleOf": 100_000}, {"multipleOf": 100_000}]});
    assert!(prepared(apart).is_ok());
    let nested = json!({"multipleOf": 100_000, "anyOf": [{"multipleOf": 100_000}]});
    assert!(prepared(nested).unwrap_err().starts_with("multipleOf "));
}

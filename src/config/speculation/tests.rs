//! Tests of the flags of speculative decoding.

use super::*;

fn ngram(draft_tokens: u8, min: u8, max: u8) -> SpeculativeConfig {
    SpeculativeConfig {
        draft_tokens,
        method: SpeculativeMethod::Ngram { lookup_min: min, lookup_max: max },
        acceptance: DraftAcceptanceRule::Exact,
    }
}

fn args(json: Option<&str>, method: &str, tokens: Option<u8>) -> SpeculationArgs {
    SpeculationArgs {
        speculative_config: json.map(|json| config(json).unwrap()),
        spec_method: method.to_owned(),
        spec_tokens: tokens,
        per_request_spec_decode_metrics: SpecDecodeMetricsArg::None,
    }
}

#[test]
fn flags_and_json_are_equivalent() {
    let read = |keys: &str| args(Some(keys), "none", None).speculation().unwrap();
    let keys = r#"{"method": "ngram", "num_speculative_tokens": 4"#;
    assert_eq!(read(&format!("{keys}}}")), ngram(4, 5, 5));
    assert_eq!(read(&format!(r#"{keys}, "prompt_lookup_max": 3}}"#)), ngram(4, 3, 3));
    assert_eq!(read(&format!(r#"{keys}, "prompt_lookup_min": 2}}"#)), ngram(4, 2, 2));
    let both = r#", "prompt_lookup_min": 2, "prompt_lookup_max": 4}"#;
    assert_eq!(read(&format!("{keys}{both}")), ngram(4, 2, 4));
    assert_eq!(args(None, "ngram", Some(4)).speculation(), Some(ngram(4, 5, 5)));
    assert_eq!(args(None, "ngram", None).speculation(), Some(ngram(1, 5, 5)));
    assert_eq!(args(None, "none", None).speculation(), None);
    let mtp_config = |draft_tokens, acceptance| {
        Some(SpeculativeConfig { draft_tokens, method: SpeculativeMethod::Mtp, acceptance })
    };
    let mtp = |draft_tokens| mtp_config(draft_tokens, DraftAcceptanceRule::Exact);
    let keys = r#"{"method": "mtp", "num_speculative_tokens": 4}"#;
    assert_eq!(args(Some(keys), "none", None).speculation(), mtp(4));
    assert_eq!(args(None, "mtp", None).speculation(), mtp(1));
    let keys = r#"{"method": "draft_model", "num_speculative_tokens": 5, "model": "small"}"#;
    let draft_model_args = args(Some(keys), "none", None);
    let expected = SpeculativeConfig {
        draft_tokens: 5,
        method: SpeculativeMethod::DraftModel,
        acceptance: DraftAcceptanceRule::Exact,
    };
    assert_eq!(
        (draft_model_args.speculation(), draft_model_args.draft_model()),
        (Some(expected), Some("small"))
    );
    let keys = r#"{"method": "eagle3", "num_speculative_tokens": 4, "model": "layer"}"#;
    let eagle3_args = args(Some(keys), "none", None);
    let expected =
        SpeculativeConfig { draft_tokens: 4, method: SpeculativeMethod::Eagle3, ..expected };
    assert_eq!(
        (eagle3_args.speculation(), eagle3_args.draft_model()),
        (Some(expected), Some("layer"))
    );
    let keys = r#"{"method": "mtp", "num_speculative_tokens": 3, "rejection_sample_method": "#;
    assert_eq!(read(&format!(r#"{keys}"strict"}}"#)), mtp(3).unwrap());
    let keys = format!(r#"{keys}"synthetic", "synthetic_acceptance_rate": 0.85}}"#);
    let synthetic = DraftAcceptanceRule::Synthetic { per_mille: 850, decrease: 0 };
    assert_eq!(args(Some(&keys), "none", None).speculation(), mtp_config(3, synthetic));
    let keys = keys.replace("rate\": 0.85", "length\": 2.78");
    let synthetic = DraftAcceptanceRule::Synthetic { per_mille: 1780, decrease: 1000 };
    assert_eq!(args(Some(&keys), "none", None).speculation(), mtp_config(3, synthetic));
}

#[test]
fn invalid_keys_are_named() {
    for (keys, expected) in [
        (r#"{"num_speculative_tokens": 4}"#, "method"),
        (r#"{"method": "ngram"}"#, "num_speculative_tokens"),
        (r#"{"method": "eagle", "num_speculative_tokens": 1}"#, "method eagle: supported"),
        (
            r#"{"method": "mtp", "num_speculative_tokens": 17}"#,
            "num_speculative_tokens 17: 1 to 16",
        ),
        (
            r#"{"method": "mtp", "num_speculative_tokens": 1, "prompt_lookup_max": 5}"#,
            "prompt_lookup_max: method ngram",
        ),
        (r#"{"method": "draft_model", "num_speculative_tokens": 1}"#, "eagle3 only"),
        (r#"{"method": "eagle3", "num_speculative_tokens": 1}"#, "eagle3 only"),
        (
            r#"{"method": "eagle3", "num_speculative_tokens": 17, "model": "m"}"#,
            "num_speculative_tokens 17: 1 to 16 for eagle3",
        ),
        (r#"{"method": "ngram", "num_speculative_tokens": 0}"#, "num_speculative_tokens 0"),
        (r#"{"method": "ngram", "num_speculative_tokens": 17}"#, "num_speculative_tokens 17"),
        (r#"{"method": "ngram", "num_speculative_tokens": 1, "model": "m"}"#, "model"),
        (
            r#"{"method": "ngram", "num_speculative_tokens": 1, "prompt_lookup_min": 6,
                "prompt_lookup_max": 5}"#,
            "prompt_lookup_min 6",
        ),
        (
            r#"{"method": "ngram", "num_speculative_tokens": 1, "prompt_lookup_max": 0}"#,
            "prompt_lookup_max 0",
        ),
        (
            r#"{"method": "mtp", "num_speculative_tokens": 1, "rejection_sample_method": "synthetic"}"#,
            "needs synthetic_acceptance_rate or synthetic_acceptance_length",
        ),
        (
            r#"{"method": "mtp", "num_speculative_tokens": 2, "rejection_sample_method": "synthetic",
                "synthetic_acceptance_length": 3.5}"#,
            "synthetic_acceptance_length 3.5: 1 to 3 for 2 draft tokens",
        ),
        (
            r#"{"method": "mtp", "num_speculative_tokens": 2, "synthetic_acceptance_length": 2}"#,
            "synthetic_acceptance_length: needs rejection_sample_method synthetic",
        ),
        (
            r#"{"method": "mtp", "num_speculative_tokens": 1, "rejection_sample_method": "typical"}"#,
            "rejection_sample_method typical: standard, strict or synthetic",
        ),
        (
            r#"{"method": "mtp", "num_speculative_tokens": 1, "synthetic_acceptance_rate": 0.5}"#,
            "needs rejection_sample_method synthetic",
        ),
        (
            r#"{"method": "mtp", "num_speculative_tokens": 1, "rejection_sample_method": "synthetic",
                "synthetic_acceptance_rate": 1.5}"#,
            "synthetic_acceptance_rate 1.5: 0 to 1",
        ),
        ("ngram", "not a JSON object"),
    ] {
        let error = config(keys).unwrap_err();
        assert!(error.contains(expected), "{keys}: {error}");
    }
    let object = r#"{"method": "ngram", "num_speculative_tokens": 4}"#;
    for (args, expected) in [
        (args(Some(object), "ngram", None), "excludes"),
        (args(None, "none", Some(2)), "needs --spec-method"),
        (args(None, "eagle", None), "--spec-method eagle: supported"),
        (args(None, "draft_model", Some(1)), "use --speculative-config"),
        (args(None, "eagle3", Some(1)), "--spec-method eagle3: use --speculative-config"),
        (args(None, "ngram", Some(40)), "--spec-tokens 40"),
        (args(None, "mtp", Some(17)), "--spec-tokens 17: 1 to 16 for mtp"),
    ] {
        let error = args.check().unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}

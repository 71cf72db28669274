//! Arguments that a host passes wrongly: each is rejected with a text that names it, and the model works afterwards.

use std::ffi::c_char;

use hadron_plugin::ForeignStep;
use hadron_plugin::abi::{hadron_close, hadron_forward, hadron_open};
use serde_json::{Value, json};

use crate::test_host::{
    BLOCK_TOKENS, BLOCKS, F32, HostMemory, HostRow, HostStep, I32, I64, TestHost,
};
use crate::test_model::{CallError, PluginFixture, TestModel};

const REJECTED: i32 = 1;

fn rejection(result: Result<(), CallError>) -> String {
    let error = result.unwrap_err();
    assert_eq!(error.status, REJECTED, "{}", error.text);
    error.text
}

#[test]
fn wrong_arrays_are_rejected_by_name() {
    let fixture = PluginFixture::read("qwen3-tied");
    let dir = tempfile::tempdir().unwrap();
    let model = TestModel::open(&fixture.options(dir.path()), None).unwrap();
    let mut host = TestHost::new(&model);
    let sequence = host.add(&fixture.tokens[..20]);
    let right = host.run_one(&model, sequence, 0, 20);
    let HostStep { memory: _memory, step } = host.write(&[HostRow { sequence, start: 0, len: 20 }]);
    type Change = (&'static str, fn(&mut ForeignStep));
    let changes: [Change; 28] = [
        ("struct_bytes is 8, expected 240", |s| s.struct_bytes = 8),
        ("token_ids is null", |s| s.token_ids.address = 0),
        ("positions is null", |s| s.positions.address = 0),
        ("slots is null", |s| s.slots.address = 0),
        ("row_starts is null", |s| s.row_starts.address = 0),
        ("context_lens is null", |s| s.context_lens.address = 0),
        ("block_tables is null", |s| s.block_tables.address = 0),
        ("hidden is null", |s| s.hidden.address = 0),
        ("token_ids has 79 bytes, the step needs 80", |s| s.token_ids.bytes -= 1),
        ("positions has 159 bytes, the step needs 160", |s| s.positions.bytes -= 1),
        ("slots has 159 bytes, the step needs 160", |s| s.slots.bytes -= 1),
        ("row_starts has 7 bytes, the step needs 8", |s| s.row_starts.bytes -= 1),
        ("context_lens has 3 bytes, the step needs 4", |s| s.context_lens.bytes -= 1),
        ("block_tables has 11 bytes, the step needs 12", |s| s.block_tables.bytes -= 1),
        ("hidden has ", |s| s.hidden.bytes -= 1),
        ("hidden is at address ", |s| s.hidden.address += 16),
        ("token_ids is at address ", |s| s.token_ids.address += 2),
        ("token_ids has dtype 0, expected [I32, I64]", |s| s.token_ids.dtype = F32),
        ("slots has dtype 4, expected [I64]", |s| s.slots.dtype = I32),
        ("block_tables has dtype 5, expected [I32]", |s| s.block_tables.dtype = I64),
        ("hidden has dtype 1, expected [F32]", |s| s.hidden.dtype = 1),
        ("tokens is 257, at most 256 is allowed", |s| s.tokens = 257),
        ("max_context_len is 513, at most 512 is allowed", |s| s.max_context_len = 513),
        ("rows of one token is 1, expected 20", |s| s.one_token_rows = 1),
        ("outputs is 2, at most 1 is allowed", |s| s.outputs = 2),
        ("output_tokens is null", |s| (s.outputs, s.output_tokens.address) = (1, 0)),
        ("output_tokens has 3 bytes, the step needs 4", |s| {
            (s.outputs, s.output_tokens.bytes) = (1, 3);
        }),
        ("output_tokens has dtype 5, expected [I32]", |s| {
            (s.outputs, s.output_tokens.dtype) = (1, I64);
        }),
    ];
    for (expected, change) in changes {
        let mut wrong = step;
        change(&mut wrong);
        let text = rejection(model.forward(&wrong));
        assert!(text.starts_with(expected), "{text:?}, expected {expected:?}");
    }
    let (rows, table) = (ForeignStep { rows: 17, ..step }, ForeignStep { table_width: 1, ..step });
    assert_eq!(rejection(model.forward(&rows)), "rows is 17, at most 16 is allowed");
    let text = rejection(model.forward(&table));
    assert_eq!(text, "max_context_len is 20, at most 16 is allowed");
    assert!(host.run_one(&model, sequence, 0, 20) == right, "the model still works");
}

#[test]
fn wrong_logits_and_kv_arrays_are_rejected() {
    let fixture = PluginFixture::read("qwen3-tied");
    let dir = tempfile::tempdir().unwrap();
    let model = TestModel::open(&fixture.options(dir.path()), None).unwrap();
    let (layers, tokens) =
        (model.describe()["kv_layers"].as_array().unwrap().len(), BLOCK_TOKENS as u64);
    let small = HostMemory::new(64, 0);
    let step = ForeignStep {
        struct_bytes: size_of::<ForeignStep>() as u32,
        tokens: 1,
        ..Default::default()
    };
    assert_eq!(rejection(model.forward(&step)), "hadron_bind_kv was not called");
    let text = rejection(model.bind_kv(&vec![small.array(F32); layers], BLOCKS as u64, tokens));
    assert!(text.starts_with("layer of the KV cache has 64 bytes, the step needs "), "{text}");
    let text = rejection(model.bind_kv(&vec![small.array(F32); layers + 1], BLOCKS as u64, tokens));
    assert_eq!(text, format!("layers of the KV cache is {}, expected {layers}", layers + 1));
    let text = rejection(model.bind_kv(&vec![small.array(I32); layers], BLOCKS as u64, tokens));
    assert_eq!(text, "layer of the KV cache has dtype 4, expected [F32]");
    let layers_of_block = vec![small.array(F32); layers];
    let text = rejection(model.bind_kv(&layers_of_block, BLOCKS as u64, 2 * tokens));
    assert_eq!(text, "block_tokens is 32, expected 16");
    let text = rejection(model.bind_kv(&layers_of_block, 1 << 60, tokens));
    assert_eq!(text, "blocks is 1152921504606846976, at most 134217727 is allowed");
    let host = TestHost::new(&model);
    let hidden = HostMemory::new(host.hidden_size * 4, 0);
    let text = rejection(model.logits(0, &hidden.array(F32), &small.array(F32), 1));
    assert_eq!(text, format!("logits has 64 bytes, the step needs {}", host.vocab * 4));
    let text = rejection(model.logits(0, &hidden.array(F32), &small.array(F32), 257));
    assert_eq!(text, "rows is 257, at most 256 is allowed");
}

#[test]
fn wrong_options_are_rejected_by_name() {
    let fixture = PluginFixture::read("qwen3-tied");
    let dir = tempfile::tempdir().unwrap();
    let options = fixture.options(dir.path());
    let with = |name: &str, value: Value| {
        let mut options = options.clone();
        options[name] = value;
        rejection(TestModel::open(&options, None).map(drop))
    };
    assert!(with("max_tokens", json!(1)).contains("unknown field `max_tokens`"));
    assert!(with("dtype", json!("int8")).contains("unknown variant `int8`"));
    assert!(with("max_num_rows", json!(0)).starts_with("options: max_num_rows is 0, expected"));
    assert!(with("capture_rows", json!([4, 17])).starts_with("options: capture_rows is 17"));
    assert!(with("model_dir", json!("/nowhere")).contains("/nowhere"));
    let window = PluginFixture::read("mistral-window");
    let window = window.options(dir.path());
    let text = rejection(TestModel::open(&window, None).map(drop));
    assert!(text.contains("sliding window"), "{text}");
    let recurrent = PluginFixture::read("qwen3_next-plain-d64").options(dir.path());
    let text = rejection(TestModel::open(&recurrent, None).map(drop));
    assert!(text.contains("recurrent state"), "{text}");
}

#[test]
fn null_pointers_are_rejected() {
    let mut text = [0u8; 64];
    let error = text.as_mut_ptr().cast::<c_char>();
    // SAFETY: null is allowed for every pointer; the texts have 64 bytes.
    unsafe {
        let null = std::ptr::null_mut();
        assert_eq!(hadron_open(std::ptr::null(), 0, std::ptr::null(), null, error, 64), REJECTED);
        assert!(text.starts_with(b"options is null\0"));
        let error = text.as_mut_ptr().cast::<c_char>();
        assert_eq!(hadron_forward(std::ptr::null_mut(), std::ptr::null(), error, 64), REJECTED);
        assert!(text.starts_with(b"model is null\0"));
        let no_text = std::ptr::null_mut();
        assert_eq!(hadron_forward(std::ptr::null_mut(), std::ptr::null(), no_text, 0), REJECTED);
        hadron_close(std::ptr::null_mut());
    }
}

//! Chat templates in requests: an expensive template fails only its own request, and the server's memory
//! stays bounded.

use super::memory_amplification::status_bytes;
use super::server_process::ServerProcess;
use crate::http_client::{HttpClient, get};
use serde_json::{Value, json};

/// Maximum growth of the server's memory in bytes. A string that a template keeps doubling would take much
/// more.
const GROWTH_BYTES: u64 = 64 << 20;

/// A template that doubles a string `times` times and then renders `what`.
fn doubled(times: u32, what: &str) -> String {
    format!(
        "{{% set n = namespace(x='x') %}}{{% for i in range({times}) %}}{{% set n.x = n.x ~ n.x %}}{{% endfor %}}{what}"
    )
}

fn post(process: &ServerProcess, template: &str) -> (u16, Value) {
    let messages = json!([{"role": "user", "content": "hi"}]);
    let body = json!({"messages": messages, "chat_template": template});
    let mut client = HttpClient::connect(process.address);
    let reply = client.post("/tokenize", &body);
    (reply.status, reply.json())
}

#[test]
fn request_templates_run_within_memory_and_processor_limits() {
    let trust = ["--trust-request-chat-template", "--port", "0", "--executor", "process"];
    let fixed = ["--kv-cache-memory-bytes", "64MiB", "--threads", "1"];
    let process = ServerProcess::start(&[&trust[..], &fixed].concat());
    let (status, reply) = post(&process, &doubled(20, "{{ n.x|length }}"));
    assert_eq!((status, &reply["count"]), (200, &json!(7)), "seven digits: {reply}");
    let before = status_bytes(process.id(), "VmHWM:");
    let busy = "{% for i in range(20000) %}{% if 'yz' in n.x %}{% endif %}{% endfor %}";
    let itself = "{% set n = namespace() %}{% set n.x = n %}{{ n|tojson }}{{ n|string }}{{ n }}";
    for (template, cause) in [
        (doubled(34, "{{ n.x|length }}"), "more than 536870912 bytes of memory"),
        (doubled(24, busy), "more than 500000 instructions"),
        (itself.to_owned(), "cannot render these messages"),
        ("{% for %}".to_owned(), "invalid chat template"),
        ("{{ raise_exception('no') }}".to_owned(), "raised an exception: no"),
    ] {
        let (status, reply) = post(&process, &template);
        let message = reply["error"]["message"].as_str().unwrap_or_default();
        assert_eq!(status, 400, "{template}: {reply}");
        assert!(message.contains(cause), "{template}: {message}");
    }
    let growth = status_bytes(process.id(), "VmHWM:") - before;
    assert!(growth <= GROWTH_BYTES, "{growth} bytes");
    assert_eq!(get(process.address, "/livez").status, 200);
}

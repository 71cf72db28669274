//! OpenTelemetry spans of requests (`--otlp-traces-endpoint`), received by a collector of the test.

use super::server_process::{ServerProcess, command};
use crate::bounded_child::run_to_end;
use crate::http_client::{HttpClient, get, post};
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::any_value::Value as AttributeValue;
use opentelemetry_proto::tonic::trace::v1::Span;
use prost::Message;
use serde_json::json;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

/// Accepts exports over HTTP and sends their spans to the test.
struct OtlpTestCollector {
    endpoint: String,
    exports: Receiver<ExportTraceServiceRequest>,
}

impl OtlpTestCollector {
    fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}/v1/traces", listener.local_addr().unwrap());
        let (sender, exports) = channel();
        std::thread::spawn(move || {
            for connection in listener.incoming() {
                serve_exports(connection.unwrap(), &sender);
            }
        });
        Self { endpoint, exports }
    }

    /// Returns all spans that were exported before the server ended.
    fn spans(&self) -> Vec<Span> {
        let exports = self.exports.try_iter();
        let resources = exports.flat_map(|export| export.resource_spans);
        let scopes = resources.flat_map(|resource| {
            let attributes = &resource.resource.as_ref().unwrap().attributes;
            assert!(attributes.iter().any(|attribute| attribute.key == "service.name"));
            resource.scope_spans
        });
        scopes.flat_map(|scope| scope.spans).collect()
    }
}

fn serve_exports(connection: TcpStream, exports: &Sender<ExportTraceServiceRequest>) {
    let mut reader = BufReader::new(connection);
    loop {
        let mut length = 0;
        loop {
            let mut line = String::new();
            if reader.read_line(&mut line).unwrap_or(0) == 0 {
                return;
            }
            let line = line.trim().to_ascii_lowercase();
            if let Some(value) = line.strip_prefix("content-length:") {
                length = value.trim().parse().unwrap();
            }
            if line.is_empty() {
                break;
            }
        }
        let mut body = vec![0; length];
        reader.read_exact(&mut body).unwrap();
        exports.send(ExportTraceServiceRequest::decode(body.as_slice()).unwrap()).unwrap();
        let reply =
            b"HTTP/1.1 200 OK\r\ncontent-type: application/x-protobuf\r\ncontent-length: 0\r\n\r\n";
        reader.get_mut().write_all(reply).unwrap();
    }
}

fn attribute(span: &Span, name: &str) -> Option<AttributeValue> {
    let attribute = span.attributes.iter().find(|attribute| attribute.key == name)?;
    attribute.value.clone()?.value
}

fn text(value: &str) -> AttributeValue {
    AttributeValue::StringValue(value.to_owned())
}

/// Decodes a hexadecimal id, as in `traceparent`.
fn id_bytes(hex: &str) -> Vec<u8> {
    let digits = hex.as_bytes().chunks(2).map(|pair| str::from_utf8(pair).unwrap());
    digits.map(|digits| u8::from_str_radix(digits, 16).unwrap()).collect()
}

const TRACE_ID: &str = "4bf92f3577b34da6a3ce929d0e0e4736";

/// Sends a text completion with this `traceparent` header.
fn complete(client: &mut HttpClient, traceparent: &str, id: &str) {
    let body = json!({"prompt": "What is", "max_tokens": 3, "ignore_eos": true, "seed": 7,
                      "temperature": 0.5, "stop": ["zz"]});
    let headers = format!("traceparent: {traceparent}\r\nX-Request-Id: {id}\r\n");
    client.send("POST", "/v1/completions", &headers, body.to_string().as_bytes());
    assert_eq!(client.read().unwrap().status, 200);
}

#[test]
fn spans_join_the_client_trace_and_have_genai_attributes() {
    let collector = OtlpTestCollector::start();
    let mut process = ServerProcess::of(&mut command(&[
        "--port",
        "0",
        "--otlp-traces-endpoint",
        &collector.endpoint,
    ]));
    let mut client = HttpClient::connect(process.address);
    complete(&mut client, &format!("00-{TRACE_ID}-00f067aa0ba902b7-01"), "sampled");
    complete(&mut client, &format!("00-{TRACE_ID}-00f067aa0ba902b7-00"), "not-sampled");
    let chat = json!({"messages": [{"role": "user", "content": "1+1?"}], "max_tokens": 2});
    assert_eq!(post(process.address, "/v1/chat/completions", &chat).status, 200);
    let invalid = json!({"prompt": "x", "n": 0});
    assert_eq!(post(process.address, "/v1/completions", &invalid).status, 400);
    assert_eq!(get(process.address, "/v1/models").status, 200);
    process.signal("TERM");
    process.exits_within(Duration::from_secs(20));
    let spans = collector.spans();
    assert_eq!(spans.len(), 3, "{spans:?}");

    let sampled = spans.iter().find(|span| span.trace_id == id_bytes(TRACE_ID)).unwrap();
    assert_eq!(sampled.parent_span_id, id_bytes("00f067aa0ba902b7"));
    assert!(sampled.name.starts_with("text_completion "), "{}", sampled.name);
    assert!(sampled.end_time_unix_nano > sampled.start_time_unix_nano);
    assert_eq!(attribute(sampled, "gen_ai.operation.name"), Some(text("text_completion")));
    assert_eq!(attribute(sampled, "gen_ai.request.id"), Some(text("sampled")));
    assert_eq!(attribute(sampled, "http.route"), Some(text("/v1/completions")));
    for (name, value) in [
        ("gen_ai.request.max_tokens", 3),
        ("gen_ai.request.seed", 7),
        ("gen_ai.usage.output_tokens", 3),
        ("http.response.status_code", 200),
    ] {
        assert_eq!(attribute(sampled, name), Some(AttributeValue::IntValue(value)), "{name}");
    }
    assert_eq!(
        attribute(sampled, "gen_ai.request.temperature"),
        Some(AttributeValue::DoubleValue(0.5))
    );
    for name in [
        "gen_ai.latency.e2e",
        "gen_ai.latency.time_to_first_token",
        "gen_ai.latency.time_in_queue",
        "gen_ai.response.finish_reasons",
        "gen_ai.request.stop_sequences",
    ] {
        assert!(attribute(sampled, name).is_some(), "{name}");
    }

    let chat = spans.iter().find(|span| span.name.starts_with("chat ")).unwrap();
    assert!(chat.parent_span_id.is_empty() && chat.trace_id != id_bytes(TRACE_ID));
    let rejected = spans.iter().find(|span| attribute(span, "error.type").is_some()).unwrap();
    assert_eq!(attribute(rejected, "error.type"), Some(text("400")));
    assert_eq!(attribute(rejected, "gen_ai.usage.output_tokens"), None);
}

#[test]
fn spans_of_embeddings_have_no_attributes_of_sampling() {
    let collector = OtlpTestCollector::start();
    let flags = ["--port", "0", "--runner", "pooling", "--otlp-traces-endpoint"];
    let args = [&flags[..], &[collector.endpoint.as_str()]].concat();
    let mut process = ServerProcess::of(&mut command(&args));
    assert_eq!(post(process.address, "/v1/embeddings", &json!({"input": "a"})).status, 200);
    process.signal("TERM");
    process.exits_within(Duration::from_secs(20));
    let spans = collector.spans();
    assert_eq!(spans.len(), 1, "{spans:?}");
    assert_eq!(attribute(&spans[0], "gen_ai.operation.name"), Some(text("embeddings")));
    assert!(attribute(&spans[0], "gen_ai.usage.input_tokens").is_some());
    let keys: Vec<&str> = spans[0].attributes.iter().map(|found| found.key.as_str()).collect();
    for name in ["temperature", "top_p", "choice.count", "max_tokens"] {
        assert!(!keys.contains(&format!("gen_ai.request.{name}").as_str()), "{keys:?}");
    }
    let reasons = attribute(&spans[0], "gen_ai.response.finish_reasons");
    assert!(format!("{reasons:?}").contains("\"stop\""), "{reasons:?}");
}

#[test]
fn missing_collector_delays_no_request_and_no_shutdown() {
    let closed = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let endpoint = format!("http://{closed}/v1/traces");
    let mut process =
        ServerProcess::of(&mut command(&["--port", "0", "--otlp-traces-endpoint", &endpoint]));
    let mut client = HttpClient::connect(process.address);
    (0..20).for_each(|id| complete(&mut client, "not a traceparent", &id.to_string()));
    process.signal("TERM");
    process.exits_within(Duration::from_secs(10));
    let log = process.stderr_text();
    assert!(log.contains("telemetry data will be lost"), "{log}");
}

#[test]
fn endpoints_other_than_http_end_the_start() {
    for endpoint in ["grpc://localhost:4317", "https://localhost/v1/traces", "localhost:4317"] {
        let output = run_to_end(&mut command(&["--port", "0", "--otlp-traces-endpoint", endpoint]));
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{text}");
        assert!(
            text.contains("--otlp-traces-endpoint") && text.contains("4318/v1/traces"),
            "{text}"
        );
    }
}

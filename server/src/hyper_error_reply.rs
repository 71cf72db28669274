//! Converts the error replies that hyper itself sends for malformed request heads to the JSON form of the
//! API.
//!
//! hyper writes such a reply (400, 414 or 431, without a body) without calling the service, and then closes
//! the connection. The reply can be recognised at the end of the written bytes: error replies of routes have
//! a body, and no body contains CR LF.

use super::anthropic;
use super::api_error::ApiError;
use super::middleware::headers_too_large;
use bytes::Bytes;

/// Upper bound on the length of hyper's own error reply in bytes: status line, content length, date and
/// connection header.
const HYPER_REPLY_BYTES_MAX: usize = 256;
const START: &[u8] = b"HTTP/1.";

/// Error reply that hyper itself has written; it is the last reply of its connection.
#[derive(Debug)]
pub(super) struct HyperErrorReply {
    /// Offset of hyper's error reply in the bytes that hyper writes.
    pub(super) from: usize,
    /// API error that corresponds to the reply.
    pub(super) error: ApiError,
    date: String,
}

impl HyperErrorReply {
    /// Returns the reply that replaces hyper's reply; `is_messages_api` selects the JSON form of the
    /// Anthropic Messages API.
    pub(super) fn rewritten(&self, is_messages_api: bool) -> Bytes {
        let error = &self.error;
        let body = if is_messages_api { anthropic::error::body(error) } else { error.body() };
        let (status, length, date) = (error.status, body.len(), &self.date);
        let head = "content-type: application/json\r\nconnection: close";
        format!("HTTP/1.1 {status}\r\n{head}\r\ncontent-length: {length}\r\n{date}\r\n{body}")
            .into()
    }
}

/// Finds hyper's own error reply at the end of the bytes that hyper writes.
#[inline]
pub(super) fn find(written: &[u8]) -> Option<HyperErrorReply> {
    if written.ends_with(b"\r\n\r\n") { find_in_tail(written) } else { None }
}

/// Whether the request line at the start of `head` contains a path of the Anthropic Messages API.
pub(super) fn is_anthropic_head(head: &[u8]) -> bool {
    let line = head.split(|&byte| byte == b'\r').find(|line| !line.trim_ascii().is_empty());
    let mut words =
        line.unwrap_or_default().trim_ascii().split(|&byte| byte == b' ' || byte == b'?');
    let path = words.nth(1).and_then(|path| std::str::from_utf8(path).ok());
    path.is_some_and(anthropic::error::is_anthropic_path)
}

fn find_in_tail(written: &[u8]) -> Option<HyperErrorReply> {
    let tail_from = written.len().saturating_sub(HYPER_REPLY_BYTES_MAX);
    let tail = &written[tail_from..];
    let at = tail.windows(START.len()).rposition(|window| window == START)?;
    let head = std::str::from_utf8(&tail[at..]).ok()?;
    let error = api_error(head.get(9..12)?)?;
    if !head.contains("\r\ncontent-length: 0\r\n") {
        return None;
    }
    let date = head.split_inclusive("\r\n").find(|line| line.starts_with("date: "));
    let date = date.unwrap_or_default().to_owned();
    Some(HyperErrorReply { from: tail_from + at, error, date })
}

/// Returns the API error that replaces hyper's own error reply with this status.
fn api_error(status: &str) -> Option<ApiError> {
    match status {
        "400" => {
            let message = "the request head is not valid HTTP";
            Some(ApiError::bad_request("invalid_value", "", message))
        }
        // hyper replies 414 if the request target is too long; this is reported like a request head that is
        // too long.
        "414" | "431" => Some(headers_too_large()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn anthropic_paths_are_recognised_by_request_line() {
        for (head, is_messages_api) in [
            ("POST /v1/messages HTTP/1.1\r\nno colon", true),
            ("\r\nPOST /v1/messages/count_tokens?beta=true HTTP/1.1\r\n", true),
            ("GET /v1/messages", true),
            ("POST /v1/messagesx HTTP/1.1", false),
            ("POST /v1/completions HTTP/1.1\r\nReferer: /v1/messages", false),
            ("POST", false),
            ("", false),
        ] {
            assert_eq!(is_anthropic_head(head.as_bytes()), is_messages_api, "{head}");
        }
    }

    const DATE: &str = "date: Sun, 22 Nov 2026 10:00:00 GMT\r\n";

    fn hyper_reply(status: &str) -> String {
        format!("HTTP/1.1 {status}\r\nconnection: close\r\ncontent-length: 0\r\n{DATE}\r\n")
    }

    #[test]
    fn hyper_generated_replies_are_found() {
        let before = "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}";
        for (status, code) in
            [("400 Bad Request", 400), ("414 URI Too Long", 431), ("431 Too Large", 431)]
        {
            let written = format!("{before}{}", hyper_reply(status));
            let found = find(written.as_bytes()).unwrap();
            assert_eq!(found.from, before.len());
            let reply = String::from_utf8(found.rewritten(false).to_vec()).unwrap();
            assert!(
                reply.starts_with(&format!("HTTP/1.1 {code} ")) && reply.contains(DATE),
                "{reply}"
            );
            let (head, body) = reply.split_once("\r\n\r\n").unwrap();
            assert!(head.contains(&format!("content-length: {}", body.len())), "{head}");
            let body: serde_json::Value = serde_json::from_str(body).unwrap();
            assert_eq!(body["error"]["code"], code);
            let reply = String::from_utf8(found.rewritten(true).to_vec()).unwrap();
            assert!(reply.contains("{\"type\":\"error\""), "{reply}");
        }
    }

    #[test]
    fn other_replies_are_not_found() {
        for other in [
            hyper_reply("200 OK"),
            hyper_reply("404 Not Found"),
            "HTTP/1.1 400 Bad Request\r\ncontent-length: 7\r\n\r\n".to_owned(), // Reply to a HEAD request.
            "HTTP/1.1 100 Continue\r\n\r\n".to_owned(),
            "5\r\nhello\r\n0\r\n\r\n".to_owned(),
            "\r\n\r\n".to_owned(),
            String::new(),
        ] {
            assert!(find(other.as_bytes()).is_none(), "{other}");
        }
    }
}

//! Reply of `/v1/embeddings`, which is serialised in pieces while the client reads it, because the JSON text
//! of a vector takes three times the memory of its numbers.

use crate::api_error::ApiError;
use crate::openai::endpoint::ReplyMetadata;
use crate::openai::usage::UsageInfo;
use crate::piece_body::IncrementalBodyWriter;
use crate::request_fields::RequestFields;
use bytes::{BufMut, BytesMut};
use std::io::Write as _;

/// Base64 alphabet.
const BASE64: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

/// Encoding of the vectors in the reply (`encoding_format`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum EncodingFormat {
    /// List of numbers.
    Float,
    /// Base64 of the little-endian bytes of the f32 values.
    Base64,
}

impl EncodingFormat {
    /// Parses `encoding_format`, and the vLLM fields that select the number type of encoded vectors.
    pub(super) fn take(fields: &mut RequestFields) -> Result<Self, ApiError> {
        for (name, supported) in
            [("embed_dtype", &["float32"][..]), ("endianness", &["native", "little"])]
        {
            let value = fields.string(name, 64)?;
            if value.is_some_and(|value| !supported.contains(&value.as_str())) {
                let message = format!("supported: {}", supported.join(", "));
                return Err(ApiError::unsupported(name, message));
            }
        }
        match fields.string("encoding_format", 64)?.as_deref() {
            None | Some("float") => Ok(Self::Float),
            Some("base64") => Ok(Self::Base64),
            Some("bytes" | "bytes_only") => {
                Err(ApiError::unsupported("encoding_format", "supported: float, base64"))
            }
            Some(_) => Err(ApiError::invalid("encoding_format", "must be \"float\" or \"base64\"")),
        }
    }
}

/// Writes the reply: `{"id", "object", "created", "model", "data": [{"index", "object", "embedding"}],
/// "usage"}`.
pub(super) struct EmbeddingWriter {
    head: BytesMut,
    vectors: Vec<Vec<f32>>,
    format: EncodingFormat,
    usage: UsageInfo,
    /// Number of vectors written.
    next: usize,
}

impl EmbeddingWriter {
    pub(super) fn new(
        head: &ReplyMetadata,
        vectors: Vec<Vec<f32>>,
        format: EncodingFormat,
        usage: UsageInfo,
    ) -> Self {
        let mut text = BytesMut::new();
        head.open("list", &mut text);
        text.put_slice(b",\"data\":[");
        Self { head: text, vectors, format, usage, next: 0 }
    }

    fn write_vector(&self, index: usize, out: &mut BytesMut) {
        let separator = if index > 0 { "," } else { "" };
        // Writing to memory cannot fail, so the result is ignored.
        let _ = write!(
            out.writer(),
            "{separator}{{\"index\":{index},\"object\":\"embedding\",\"embedding\":"
        );
        match self.format {
            EncodingFormat::Float => write_floats(&self.vectors[index], out),
            EncodingFormat::Base64 => write_base64(&self.vectors[index], out),
        }
        out.put_u8(b'}');
    }
}

impl IncrementalBodyWriter for EmbeddingWriter {
    fn write(&mut self, bytes: usize, out: &mut BytesMut) -> bool {
        let end = out.len() + bytes;
        out.put_slice(&std::mem::take(&mut self.head));
        while out.len() < end && self.next < self.vectors.len() {
            self.write_vector(self.next, out);
            self.vectors[self.next] = Vec::new();
            self.next += 1;
        }
        if self.next < self.vectors.len() {
            return true;
        }
        out.put_slice(b"],\"usage\":");
        self.usage.write(out);
        out.put_u8(b'}');
        false
    }
}

/// Appends a vector as a JSON list, with the shortest decimal form that identifies each f32 value.
fn write_floats(vector: &[f32], out: &mut BytesMut) {
    out.put_u8(b'[');
    for (index, value) in vector.iter().enumerate() {
        let separator = if index > 0 { "," } else { "" };
        // Writing to memory cannot fail, so the result is ignored.
        let _ = write!(out.writer(), "{separator}{value:?}");
    }
    out.put_u8(b']');
}

/// Appends a vector as a JSON string: the base64 encoding of its little-endian bytes.
fn write_base64(vector: &[f32], out: &mut BytesMut) {
    let bytes: Vec<u8> = vector.iter().flat_map(|value| value.to_le_bytes()).collect();
    out.put_u8(b'"');
    for group in bytes.chunks(3) {
        let byte = |at: usize| u32::from(group.get(at).copied().unwrap_or(0));
        let bits = byte(0) << 16 | byte(1) << 8 | byte(2);
        for digit in 0..4 {
            let is_padding = digit > group.len();
            let value = (bits >> (18 - 6 * digit)) as usize & 63;
            out.put_u8(if is_padding { b'=' } else { BASE64[value] });
        }
    }
    out.put_u8(b'"');
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn text(write: impl Fn(&mut BytesMut)) -> String {
        let mut out = BytesMut::new();
        write(&mut out);
        String::from_utf8(out.to_vec()).unwrap()
    }

    #[test]
    fn base64_has_the_padding_of_its_length() {
        assert_eq!(text(|out| write_base64(&[1.0], out)), "\"AACAPw==\"");
        assert_eq!(text(|out| write_base64(&[1.0, -2.5], out)), "\"AACAPwAAIMA=\"");
        assert_eq!(text(|out| write_base64(&[0.5, 0.25, 1e-7], out)), "\"AAAAPwAAgD6Vv9Yz\"");
    }

    #[test]
    fn floats_are_json_numbers_of_the_same_value() {
        let vector = [1.0, -0.1, 1e-7, 3.4e38, f32::MIN_POSITIVE, 1.0 / 3.0];
        let parsed: Value = serde_json::from_str(&text(|out| write_floats(&vector, out))).unwrap();
        let values = parsed.as_array().unwrap().iter().map(|value| value.as_f64().unwrap() as f32);
        assert_eq!(values.collect::<Vec<_>>(), vector);
    }

    #[test]
    fn pieces_join_to_one_object() {
        let head = ReplyMetadata {
            id: "embd-1".to_owned(),
            created: 7,
            model: "m".to_owned(),
            fingerprint: "fp".to_owned(),
        };
        let usage = UsageInfo { prompt_tokens: 3, ..UsageInfo::default() };
        let vectors = vec![vec![1.0, 0.5], vec![0.0]];
        let mut writer = EmbeddingWriter::new(&head, vectors, EncodingFormat::Float, usage);
        let (mut out, mut pieces) = (BytesMut::new(), 1);
        while writer.write(1, &mut out) {
            pieces += 1;
        }
        assert_eq!(pieces, 3);
        let reply: Value = serde_json::from_slice(&out).unwrap();
        let vector = |index: u32, embedding: Value| json!({"index": index, "object": "embedding", "embedding": embedding});
        assert_eq!(reply["data"], json!([vector(0, json!([1.0, 0.5])), vector(1, json!([0.0]))]));
        assert_eq!(
            reply["usage"],
            json!({"prompt_tokens": 3, "completion_tokens": 0, "total_tokens": 3})
        );
        assert_eq!((&reply["object"], &reply["id"]), (&json!("list"), &json!("embd-1")));
    }
}

//! Estimates the heap memory of JSON values, for which memory is reserved in the budget of waiting requests.

use serde_json::Value;
use std::mem::size_of;

/// Overhead of an object in bytes, in addition to its members: hash index and spare capacity.
const OBJECT_BYTES: usize = 256;
/// Overhead of a string in bytes, in addition to its characters: rounding by the allocator.
const STRING_BYTES: usize = 16;
/// Overhead of an object member in bytes (hash, key, value, index), in addition to the key's characters and
/// the value's heap memory.
const MEMBER_BYTES: usize = 2 * size_of::<usize>() + size_of::<String>() + size_of::<Value>();

/// Estimates the heap memory of a value in bytes, with a tendency to overestimate.
pub(super) fn heap_bytes(value: &Value) -> u64 {
    let own = match value {
        Value::Null | Value::Bool(_) | Value::Number(_) => 0,
        Value::String(text) => text.len() + STRING_BYTES,
        Value::Array(list) => list.len() * size_of::<Value>(),
        Value::Object(members) => {
            let keys: usize = members.keys().map(|key| key.len() + STRING_BYTES).sum();
            OBJECT_BYTES + keys + members.len() * MEMBER_BYTES
        }
    };
    let inner: u64 = match value {
        Value::Array(list) => list.iter().map(heap_bytes).sum(),
        Value::Object(members) => members.values().map(heap_bytes).sum(),
        _ => 0,
    };
    own as u64 + inner
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn nested_values_count_more_than_their_text() {
        assert_eq!(heap_bytes(&json!(7)), 0);
        assert_eq!(heap_bytes(&json!("abcd")), 20);
        let small_objects = json!(vec![json!({"a": 1}); 1_000]);
        let text = small_objects.to_string().len() as u64;
        let bytes = heap_bytes(&small_objects);
        assert!(bytes > 40 * text && bytes < 100 * text, "{bytes} of {text}");
    }
}

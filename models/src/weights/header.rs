//! Parser for headers of safetensors files, which are untrusted input.
//!
//! A file consists of the header length (little-endian `u64`), the header as JSON, and the data section. The
//! tensors must fill the data section exactly, without gap or overlap. All arithmetic is checked for
//! overflow, and every allocation is limited by the size of the file.

use crate::error::{StoredTensorError, WeightFileError};
use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};
use std::fmt;
use std::ops::Range;

/// Largest header length that the safetensors format allows, in bytes.
const HEADER_LIMIT_BYTES: u64 = 100_000_000;
const METADATA: &str = "__metadata__";

/// Dtype of a tensor in the safetensors format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StoredDType {
    F64,
    F32,
    F16,
    BF16,
    F8E4M3,
    F8E5M2,
    F8E8M0,
    I64,
    I32,
    I8,
    U8,
    Bool,
}

/// Dtype, shape and location of a tensor in a safetensors file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct StoredTensor {
    pub(crate) dtype: StoredDType,
    pub(crate) shape: Vec<u64>,
    /// Byte range of the tensor's data, relative to the start of the file.
    pub(crate) bytes: Range<usize>,
}

/// Tensor from a header, after its dtype, shape and byte range have been checked.
struct HeaderTensor {
    name: String,
    dtype: StoredDType,
    shape: Vec<u64>,
    /// Byte range of the tensor, relative to the start of the data section.
    data: Range<u64>,
}

/// Error in the header of a safetensors file; it concerns the whole file or one tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum SafetensorsHeaderError {
    File(WeightFileError),
    Tensor(String, StoredTensorError),
}

/// Parses the header of a file. Returns the tensors in the order of their data offsets.
pub(crate) fn parse(file: &[u8]) -> Result<Vec<(String, StoredTensor)>, SafetensorsHeaderError> {
    let (json, data_start) = header_json(file).map_err(SafetensorsHeaderError::File)?;
    let HeaderEntries(entries) = serde_json::from_slice(json).map_err(|e| {
        SafetensorsHeaderError::File(WeightFileError::Header { detail: e.to_string() })
    })?;
    let data_bytes = (file.len() - data_start) as u64;
    let mut tensors = Vec::with_capacity(entries.len());
    for (name, entry) in entries {
        match entry.check(data_bytes) {
            Ok((dtype, data)) => {
                tensors.push(HeaderTensor { name, dtype, shape: entry.shape, data });
            }
            Err(fault) => return Err(SafetensorsHeaderError::Tensor(name, fault)),
        }
    }
    tensors.sort_by_key(|tensor| (tensor.data.start, tensor.data.end));
    check_contiguous(&tensors, data_bytes)?;
    let file_range = |r: Range<u64>| data_start + r.start as usize..data_start + r.end as usize;
    let stored = |HeaderTensor { name, dtype, shape, data }| {
        (name, StoredTensor { dtype, shape, bytes: file_range(data) })
    };
    Ok(tensors.into_iter().map(stored).collect())
}

/// Checks that the tensors, sorted by data offset, fill `data_bytes` bytes without gap or overlap.
fn check_contiguous(
    tensors: &[HeaderTensor],
    data_bytes: u64,
) -> Result<(), SafetensorsHeaderError> {
    let mut expected = 0;
    for HeaderTensor { name, data, .. } in tensors {
        if data.start != expected {
            let fault = StoredTensorError::Gap { start: data.start, expected };
            return Err(SafetensorsHeaderError::Tensor(name.clone(), fault));
        }
        expected = data.end;
    }
    if expected != data_bytes {
        return Err(SafetensorsHeaderError::File(WeightFileError::End {
            end: expected,
            bytes: data_bytes,
        }));
    }
    Ok(())
}

fn header_json(file: &[u8]) -> Result<(&[u8], usize), WeightFileError> {
    let Some((length, rest)) = file.split_first_chunk::<8>() else {
        return Err(WeightFileError::Short { bytes: file.len() });
    };
    let stated = u64::from_le_bytes(*length);
    let limit = HEADER_LIMIT_BYTES.min(rest.len() as u64);
    if stated > limit {
        return Err(WeightFileError::HeaderLength { stated, limit });
    }
    Ok((&rest[..stated as usize], 8 + stated as usize))
}

/// JSON entry of one tensor in a safetensors header.
#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct HeaderEntry {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

impl HeaderEntry {
    fn check(&self, data_bytes: u64) -> Result<(StoredDType, Range<u64>), StoredTensorError> {
        let dtype = StoredDType::ALL.into_iter().find(|d| d.name() == self.dtype);
        let Some(dtype) = dtype else {
            return Err(StoredTensorError::UnknownDType(self.dtype.clone()));
        };
        let (start, end) = self.data_offsets;
        if start > end || end > data_bytes {
            return Err(StoredTensorError::Offsets { start, end, bytes: data_bytes });
        }
        let elements = self.shape.iter().try_fold(1u64, |n, d| n.checked_mul(*d));
        if elements.and_then(|n| n.checked_mul(dtype.bytes())) != Some(end - start) {
            let shape = self.shape.clone();
            return Err(StoredTensorError::Size { shape, dtype: dtype.name(), bytes: end - start });
        }
        Ok((dtype, start..end))
    }
}

impl StoredDType {
    const ALL: [Self; 12] = [
        Self::F64,
        Self::F32,
        Self::F16,
        Self::BF16,
        Self::F8E4M3,
        Self::F8E5M2,
        Self::F8E8M0,
        Self::I64,
        Self::I32,
        Self::I8,
        Self::U8,
        Self::Bool,
    ];

    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::F64 => "F64",
            Self::F32 => "F32",
            Self::F16 => "F16",
            Self::BF16 => "BF16",
            Self::F8E4M3 => "F8_E4M3",
            Self::F8E5M2 => "F8_E5M2",
            Self::F8E8M0 => "F8_E8M0",
            Self::I64 => "I64",
            Self::I32 => "I32",
            Self::I8 => "I8",
            Self::U8 => "U8",
            Self::Bool => "BOOL",
        }
    }

    pub(crate) const fn bytes(self) -> u64 {
        match self {
            Self::F64 | Self::I64 => 8,
            Self::F32 | Self::I32 => 4,
            Self::F16 | Self::BF16 => 2,
            _ => 1,
        }
    }
}

/// Tensors in header order. They are stored as a list instead of a map, so that duplicate names are detected.
struct HeaderEntries(Vec<(String, HeaderEntry)>);

impl<'de> Deserialize<'de> for HeaderEntries {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(HeaderEntriesVisitor)
    }
}

struct HeaderEntriesVisitor;

impl<'de> Visitor<'de> for HeaderEntriesVisitor {
    type Value = HeaderEntries;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<HeaderEntries, A::Error> {
        use serde::de::Error;
        let mut entries = Vec::new();
        let mut seen = std::collections::HashSet::new();
        while let Some(name) = map.next_key::<String>()? {
            if !seen.insert(name.clone()) {
                return Err(A::Error::custom(format_args!("`{name}` occurs twice")));
            }
            if name == METADATA {
                map.next_value::<std::collections::HashMap<String, String>>()?;
            } else {
                entries.push((name, map.next_value()?));
            }
        }
        Ok(HeaderEntries(entries))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use expect_test::expect;

    fn file(json: &str, data: usize) -> Vec<u8> {
        let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
        bytes.extend(json.bytes());
        bytes.resize(bytes.len() + data, 0);
        bytes
    }

    fn check(json: &str, data: usize) -> String {
        match parse(&file(json, data)) {
            Ok(tensors) => {
                let line = |(name, t): &(String, StoredTensor)| {
                    format!("{name} {} {:?} {}", t.dtype.name(), t.shape, t.bytes.len())
                };
                tensors.iter().map(line).collect::<Vec<_>>().join(", ")
            }
            Err(SafetensorsHeaderError::File(fault)) => fault.to_string(),
            Err(SafetensorsHeaderError::Tensor(name, fault)) => format!("{name}: {fault}"),
        }
    }

    #[test]
    fn tensors_tile_the_data() {
        let two = r#"{"b":{"dtype":"BF16","shape":[2,2],"data_offsets":[4,12]},
            "__metadata__":{"format":"pt"}, "a":{"dtype":"F32","shape":[],"data_offsets":[0,4]}}  "#;
        expect!["a F32 [] 4, b BF16 [2, 2] 8"].assert_eq(&check(two, 12));
        expect!["tensors end at byte 12 of the data, but there are 13"].assert_eq(&check(two, 13));
        expect!["b: bytes [4, 12) are outside of the 11 bytes of data"].assert_eq(&check(two, 11));
        expect!["tensors end at byte 0 of the data, but there are 1"].assert_eq(&check("{}", 1));
        expect![""].assert_eq(&check("{}", 0));
    }

    #[test]
    fn inconsistent_headers_are_rejected() {
        let one = |shape: &str, offsets: &str| {
            check(
                &format!(r#"{{"a":{{"dtype":"U8","shape":{shape},"data_offsets":{offsets}}}}}"#),
                8,
            )
        };
        expect!["a U8 [2, 4] 8"].assert_eq(&one("[2,4]", "[0,8]"));
        expect!["a: shape [3] of U8 does not match 8 bytes"].assert_eq(&one("[3]", "[0,8]"));
        expect!["a: shape [4294967296, 4294967296, 8] of U8 does not match 8 bytes"]
            .assert_eq(&one("[4294967296,4294967296,8]", "[0,8]"));
        expect!["a: bytes [8, 0) are outside of the 8 bytes of data"]
            .assert_eq(&one("[8]", "[8,0]"));
        expect!["a: starts at byte 1 of the data, but the tensor before it ends at 0"]
            .assert_eq(&one("[7]", "[1,8]"));
        expect!["invalid header: invalid value: integer `-1`, expected u64 at line 1 column 30"]
            .assert_eq(&one("[-1]", "[0,8]"));
        let overlap = r#"{"a":{"dtype":"U8","shape":[6],"data_offsets":[0,6]},
            "b":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}}"#;
        expect!["b: starts at byte 4 of the data, but the tensor before it ends at 6"]
            .assert_eq(&check(overlap, 8));
        let twice = r#"{"a":{"dtype":"U8","shape":[8],"data_offsets":[0,8]},
            "a":{"dtype":"U8","shape":[8],"data_offsets":[0,8]}}"#;
        expect!["invalid header: `a` occurs twice at line 2 column 15"].assert_eq(&check(twice, 8));
        let dtype = r#"{"a":{"dtype":"F4","shape":[8],"data_offsets":[0,8]}}"#;
        expect!["a: dtype `F4` is unknown"].assert_eq(&check(dtype, 8));
        let extra = r#"{"a":{"dtype":"U8","shape":[8],"data_offsets":[0,8],"x":1}}"#;
        expect!["invalid header: unknown field `x`, expected one of `dtype`, `shape`, `data_offsets` at line 1 column 55"]
            .assert_eq(&check(extra, 8));
    }

    #[test]
    fn header_longer_than_the_file_is_rejected() {
        let length = |stated: u64| {
            let mut bytes = stated.to_le_bytes().to_vec();
            bytes.extend(b"{}");
            format!("{:?}", parse(&bytes).unwrap_err())
        };
        assert!(length(3).contains("HeaderLength { stated: 3, limit: 2 }"));
        assert!(length(u64::MAX).contains("HeaderLength"));
        assert_eq!(
            parse(&[0; 7]).unwrap_err(),
            SafetensorsHeaderError::File(WeightFileError::Short { bytes: 7 })
        );
    }
}

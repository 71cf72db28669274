//! Flag values with units: durations (`30`, `30s`, `500ms`), sizes in bytes (`4GiB`, `512MB`), numbers of
//! tokens (`32k`).

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// Duration given by a flag. A number without unit is in seconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct DurationArg(pub Duration);

impl FromStr for DurationArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (number, scale) = match text.strip_suffix("ms") {
            Some(number) => (number, 1e-3),
            None => (text.strip_suffix('s').unwrap_or(text), 1.0),
        };
        let seconds = number.trim().parse::<f64>().map(|n| n * scale);
        match seconds.ok().map(Duration::try_from_secs_f64) {
            Some(Ok(duration)) => Ok(Self(duration)),
            _ => Err("not a duration such as 30, 30s or 500ms".to_owned()),
        }
    }
}

impl fmt::Display for DurationArg {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}s", self.0.as_secs_f64())
    }
}

/// Number of bytes given by a flag, optionally with a unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct ByteSize(pub u64);

impl FromStr for ByteSize {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
        let (number, unit) = text.split_at(digits);
        let scale: f64 = match unit.trim().to_ascii_lowercase().as_str() {
            "" | "b" => 1.0,
            "k" | "kib" => 1024.0,
            "kb" => 1e3,
            "m" | "mib" => 1_048_576.0,
            "mb" => 1e6,
            "g" | "gib" => 1_073_741_824.0,
            "gb" => 1e9,
            _ => return Err("not a size such as 1073741824, 4GiB or 500MB".to_owned()),
        };
        let bytes = number.parse::<f64>().map_err(|e| e.to_string())? * scale;
        Ok(Self(bytes as u64))
    }
}

impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let units = [(30, "GiB"), (20, "MiB"), (10, "KiB")];
        let whole =
            units.iter().find(|&&(shift, _)| self.0 > 0 && self.0.is_multiple_of(1 << shift));
        match whole {
            Some((shift, unit)) => write!(f, "{}{unit}", self.0 >> shift),
            None => write!(f, "{}", self.0),
        }
    }
}

/// Parses a number of tokens: `32768`, `32k` (thousands) or `32K` (multiples of 1,024), as in vLLM.
pub(super) fn tokens(text: &str) -> Result<u32, String> {
    let scale = |number: &str, by: f64| number.parse::<f64>().ok().map(|n| n * by);
    let value = match text.chars().last() {
        Some('k') => scale(&text[..text.len() - 1], 1e3),
        Some('K') => scale(&text[..text.len() - 1], 1024.0),
        Some('m') => scale(&text[..text.len() - 1], 1e6),
        Some('M') => scale(&text[..text.len() - 1], 1_048_576.0),
        _ => text.parse::<u32>().ok().map(f64::from),
    };
    let whole = value.filter(|v| *v >= 0.0 && *v <= f64::from(u32::MAX) && v.fract() == 0.0);
    whole.map(|v| v as u32).ok_or_else(|| "not a count such as 4096 or 32k".to_owned())
}

/// Value of `--max-model-len`: a number of tokens, or `auto`, for which vLLM also accepts -1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MaxModelLenArg {
    /// The model's maximum length, or less if the KV cache is smaller.
    Auto,
    /// The given number of tokens.
    Tokens(u32),
}

impl FromStr for MaxModelLenArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" | "-1" => Ok(Self::Auto),
            text => tokens(text).map(Self::Tokens).map_err(|error| error + ", nor auto"),
        }
    }
}

impl MaxModelLenArg {
    /// Returns the number of tokens; `None` for `auto`.
    pub fn tokens(self) -> Option<u32> {
        match self {
            Self::Auto => None,
            Self::Tokens(count) => Some(count),
        }
    }
}

/// Parses a JSON object.
pub(super) fn json_object(
    text: &str,
) -> Result<serde_json::Map<String, serde_json::Value>, String> {
    serde_json::from_str(text).map_err(|e| format!("not a JSON object: {e}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_are_read_and_written_back() {
        assert_eq!("500ms".parse::<DurationArg>().unwrap().0, Duration::from_millis(500));
        assert_eq!("30".parse::<DurationArg>().unwrap().to_string(), "30s");
        assert!("-1".parse::<DurationArg>().is_err());
        assert_eq!("4GiB".parse::<ByteSize>().unwrap(), ByteSize(4 << 30));
        assert_eq!("1.5k".parse::<ByteSize>().unwrap(), ByteSize(1536));
        assert_eq!(ByteSize(1 << 30).to_string(), "1GiB");
        assert_eq!(tokens("32k"), Ok(32_000));
        assert_eq!(tokens("32K"), Ok(32_768));
        assert!(tokens("1.5").is_err());
        assert_eq!("4K".parse(), Ok(MaxModelLenArg::Tokens(4_096)));
        assert_eq!(
            ["auto", "-1"].map(str::parse),
            [Ok(MaxModelLenArg::Auto), Ok(MaxModelLenArg::Auto)]
        );
        assert!("-2".parse::<MaxModelLenArg>().is_err_and(|error| error.contains("nor auto")));
    }
}

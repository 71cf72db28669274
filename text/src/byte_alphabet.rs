//! GPT-2's byte-level alphabet: one printable character per byte, in which byte-level BPE tokens are spelt.

/// Returns the byte that the alphabet writes as `c`: printable Latin-1 maps to itself, the other 68 bytes are
/// mapped to U+0100 and up in order.
pub(super) fn byte_of(c: char) -> Option<u8> {
    let code = c as u32;
    match code {
        0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff => Some(code as u8),
        0x100..=0x120 => Some((code - 0x100) as u8), // 0x00..=0x20
        0x121..=0x142 => Some((code - 0x121 + 0x7f) as u8), // 0x7f..=0xa0
        0x143 => Some(0xad),
        _ => None,
    }
}

/// Returns `bytes`, the bytes of a token, in the byte-level alphabet.
pub(super) fn byte_level_spelling(bytes: &[u8]) -> String {
    bytes.iter().map(|&byte| letter_of(byte)).collect()
}

fn letter_of(byte: u8) -> char {
    let code = match byte {
        0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff => u32::from(byte),
        0x00..=0x20 => 0x100 + u32::from(byte),
        0x7f..=0xa0 => 0x121 + u32::from(byte - 0x7f),
        0xad => 0x143,
    };
    char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn byte_level_alphabet_is_a_bijection() {
        for byte in 0..=u8::MAX {
            assert_eq!(byte_of(letter_of(byte)), Some(byte));
        }
        let letters = (0..0x200).filter_map(char::from_u32).filter(|c| byte_of(*c).is_some());
        assert_eq!(letters.count(), 256);
        assert_eq!(byte_level_spelling(b" \n\xff"), "ĠĊÿ");
    }
}

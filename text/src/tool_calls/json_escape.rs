//! Escapes the characters of JSON strings.

/// Passes `c` to `out` in the form that JSON requires inside a string.
pub(super) fn escape(c: char, out: &mut dyn FnMut(&str)) {
    match c {
        '"' => out("\\\""),
        '\\' => out("\\\\"),
        '\n' => out("\\n"),
        '\r' => out("\\r"),
        '\t' => out("\\t"),
        c @ '\0'..='\x1f' => out(&format!("\\u{:04x}", u32::from(c))),
        c => out(c.encode_utf8(&mut [0; 4])),
    }
}

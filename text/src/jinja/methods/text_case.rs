//! Case mappings of strings as in Python.

/// Returns the title case of a character if it differs from the upper case.
fn title_digraph(c: char) -> Option<char> {
    Some(match c {
        'Ǆ' | 'ǅ' | 'ǆ' => 'ǅ',
        'Ǉ' | 'ǈ' | 'ǉ' => 'ǈ',
        'Ǌ' | 'ǋ' | 'ǌ' => 'ǋ',
        'Ǳ' | 'ǲ' | 'ǳ' => 'ǲ',
        // Greek letters with iota subscript: the title-case form is one character that includes the
        // subscript.
        '\u{1f80}'..='\u{1f87}' | '\u{1f90}'..='\u{1f97}' | '\u{1fa0}'..='\u{1fa7}' => {
            char::from_u32(c as u32 + 8)?
        }
        // The Greek letters are already in title case. The Georgian letters have an upper-case form, but
        // title case leaves them unchanged.
        '\u{1f88}'..='\u{1f8f}'
        | '\u{1f98}'..='\u{1f9f}'
        | '\u{1fa8}'..='\u{1faf}'
        | '\u{10d0}'..='\u{10fa}'
        | '\u{10fd}'..='\u{10ff}' => c,
        '\u{1fb3}' | '\u{1fbc}' => '\u{1fbc}',
        '\u{1fc3}' | '\u{1fcc}' => '\u{1fcc}',
        '\u{1ff3}' | '\u{1ffc}' => '\u{1ffc}',
        _ => return None,
    })
}

/// Appends the title case of a character.
fn push_title(c: char, out: &mut String) {
    if let Some(title) = title_digraph(c) {
        out.push(title);
        return;
    }
    if c == 'ŉ' {
        out.push_str("ʼN");
        return;
    }
    // The upper case of some characters has several letters, such as `SS` for `ß`; in title case, only the
    // first of them is in upper case.
    let mut upper = c.to_uppercase();
    out.extend(upper.next());
    out.extend(upper.flat_map(char::to_lowercase));
}

/// Lower case of a string.
pub(crate) fn lower(text: &str) -> String {
    text.to_lowercase()
}

/// Upper case of a string.
pub(crate) fn upper(text: &str) -> String {
    text.to_uppercase()
}

/// Returns `text` with its first character in title case and the others in lower case.
pub(crate) fn capitalize(text: &str) -> String {
    let mut chars = text.chars();
    let Some(first) = chars.next() else { return String::new() };
    let mut out = String::with_capacity(text.len());
    push_title(first, &mut out);
    // The lower case of a sigma depends on the characters before it, so the whole text is converted.
    let lower = text.to_lowercase();
    let skipped: usize = first.to_lowercase().map(char::len_utf8).sum();
    out.push_str(lower.get(skipped..).unwrap_or_default());
    out
}

/// Returns `text` with the first character of each word in title case; a word is a run of cased characters.
pub(crate) fn title(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut in_word = false;
    for (at, c) in text.char_indices() {
        if in_word {
            push_lower(text, at, c, &mut out);
        } else {
            push_title(c, &mut out);
        }
        in_word = is_cased(c);
    }
    out
}

fn push_lower(text: &str, at: usize, c: char, out: &mut String) {
    if c == 'Σ' {
        let before = text[..at].chars().next_back().is_some_and(is_cased);
        let after = text[at + c.len_utf8()..].chars().next().is_some_and(is_cased);
        out.push(if before && !after { 'ς' } else { 'σ' });
    } else {
        out.extend(c.to_lowercase());
    }
}

/// Returns `text` with upper-case characters in lower case and lower-case characters in upper case.
pub(crate) fn swapcase(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for (at, c) in text.char_indices() {
        if c.is_uppercase() {
            push_lower(text, at, c, &mut out);
        } else if c.is_lowercase() {
            out.extend(c.to_uppercase());
        } else {
            out.push(c);
        }
    }
    out
}

/// Whether a character has case.
pub(crate) fn is_cased(c: char) -> bool {
    c.is_lowercase() || c.is_uppercase() || is_title(c)
}

/// Whether a character is in title case.
pub(crate) fn is_title(c: char) -> bool {
    !c.is_lowercase()
        && !c.is_uppercase()
        && title_digraph(c) == Some(c)
        && c.to_lowercase().next() != Some(c)
}

/// Lower case for comparisons.
pub(crate) fn casefold(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            'ς' => out.push('σ'),
            'ſ' | 'ẛ' => out.extend(if c == 'ſ' { 's' } else { 'ṡ' }.to_lowercase()),
            'µ' => out.push('μ'),
            c => {
                // If the upper case of a character has several letters, the case folding of the character is
                // the lower case of these letters.
                let upper: Vec<char> = c.to_uppercase().collect();
                if upper.len() > 1 && c != 'ŉ' && c != 'ǰ' {
                    out.extend(upper.into_iter().flat_map(char::to_lowercase));
                } else {
                    out.extend(c.to_lowercase());
                }
            }
        }
    }
    out
}

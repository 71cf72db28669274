//! URI references (RFC 3986) and JSON pointers (RFC 6901), as needed for `$id` and `$ref` in schemas.

/// Parts of a URI reference without its fragment.
struct UriParts<'a> {
    scheme: Option<&'a str>,
    authority: Option<&'a str>,
    path: &'a str,
    query: Option<&'a str>,
}

impl<'a> UriParts<'a> {
    /// Splits a URI reference according to RFC 3986, appendix B.
    fn of(uri: &'a str) -> Self {
        let is_scheme = |text: &&str| {
            text.starts_with(|c: char| c.is_ascii_alphabetic())
                && text.chars().all(|c| c.is_ascii_alphanumeric() || "+-.".contains(c))
        };
        let scheme = uri.split_once(':').map(|(scheme, _)| scheme).filter(is_scheme);
        let rest = scheme.map_or(uri, |scheme| &uri[scheme.len() + 1..]);
        let (rest, query) = match rest.split_once('?') {
            Some((rest, query)) => (rest, Some(query)),
            None => (rest, None),
        };
        let Some(after_slashes) = rest.strip_prefix("//") else {
            return Self { scheme, authority: None, path: rest, query };
        };
        let end = after_slashes.find('/').unwrap_or(after_slashes.len());
        let (authority, path) = after_slashes.split_at(end);
        Self { scheme, authority: Some(authority), path, query }
    }

    fn to_uri(&self) -> String {
        let scheme = self.scheme.map(|scheme| format!("{scheme}:")).unwrap_or_default();
        let authority = self.authority.map(|name| format!("//{name}")).unwrap_or_default();
        let query = self.query.map(|query| format!("?{query}")).unwrap_or_default();
        format!("{scheme}{authority}{}{query}", self.path)
    }
}

/// URI of a document, and the fragment in its original spelling.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct ResolvedUri<'a> {
    /// URI of the document, without fragment.
    pub(super) document: String,
    /// Fragment after `#`; empty if absent.
    pub(super) fragment: &'a str,
}

/// Resolves a reference against the URI of the document that contains it (RFC 3986, section 5.2).
pub(super) fn resolve<'a>(base: &str, reference: &'a str) -> ResolvedUri<'a> {
    let (reference, fragment) = reference.split_once('#').unwrap_or((reference, ""));
    let (base, relative) = (UriParts::of(base), UriParts::of(reference));
    if relative.scheme.is_some() {
        return ResolvedUri { document: relative.to_uri(), fragment };
    }
    if relative.authority.is_some() {
        let document = UriParts { scheme: base.scheme, ..relative }.to_uri();
        return ResolvedUri { document, fragment };
    }
    let query = if relative.path.is_empty() && relative.query.is_none() {
        base.query
    } else {
        relative.query
    };
    let path = if relative.path.is_empty() {
        base.path.to_owned()
    } else if relative.path.starts_with('/') {
        without_dot_segments(relative.path)
    } else {
        let folder = base.path.rfind('/').map_or("", |slash| &base.path[..=slash]);
        let folder = if folder.is_empty() && base.authority.is_some() { "/" } else { folder };
        without_dot_segments(&format!("{folder}{}", relative.path))
    };
    let (scheme, authority) = (base.scheme, base.authority);
    ResolvedUri { document: UriParts { scheme, authority, path: &path, query }.to_uri(), fragment }
}

/// Removes `.` and `..` from a path (RFC 3986, section 5.2.4).
fn without_dot_segments(path: &str) -> String {
    let mut kept: Vec<&str> = Vec::new();
    let mut segments = path.split('/').peekable();
    while let Some(segment) = segments.next() {
        let is_last = segments.peek().is_none();
        match segment {
            ".." if kept.last().is_some_and(|last| !last.is_empty()) => drop(kept.pop()),
            "." | ".." => {}
            _ => {
                kept.push(segment);
                continue;
            }
        }
        if is_last {
            kept.push("");
        }
    }
    kept.join("/")
}

/// Decodes the percent escapes of a fragment; `None` if an escape is malformed or the result is not UTF-8.
pub(super) fn percent_decoded(fragment: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(fragment.len());
    let mut rest = fragment.as_bytes();
    while let Some((&byte, after)) = rest.split_first() {
        rest = after;
        if byte != b'%' {
            bytes.push(byte);
            continue;
        }
        let digits = std::str::from_utf8(rest.get(..2)?).ok()?;
        if !digits.bytes().all(|digit| digit.is_ascii_hexdigit()) {
            return None;
        }
        bytes.push(u8::from_str_radix(digits, 16).ok()?);
        rest = &rest[2..];
    }
    String::from_utf8(bytes).ok()
}

/// Splits a JSON pointer into its tokens; `None` if an escape is malformed. The empty pointer has no tokens.
pub(super) fn pointer_tokens(pointer: &str) -> Option<Vec<String>> {
    if pointer.is_empty() {
        return Some(Vec::new());
    }
    pointer.strip_prefix('/')?.split('/').map(unescaped_token).collect()
}

fn unescaped_token(token: &str) -> Option<String> {
    let mut plain = String::with_capacity(token.len());
    let mut chars = token.chars();
    while let Some(c) = chars.next() {
        plain.push(match c {
            '~' => match chars.next()? {
                '0' => '~',
                '1' => '/',
                _ => return None,
            },
            _ => c,
        });
    }
    Some(plain)
}

/// Escapes a member name for a JSON pointer.
pub(super) fn escaped_token(name: &str) -> String {
    name.replace('~', "~0").replace('/', "~1")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uri_references_resolve_as_in_rfc_3986() {
        const BASE: &str = "http://a/b/c/d;p?q";
        for (reference, resolved) in [
            ("g:h", "g:h"),
            ("g", "http://a/b/c/g"),
            ("./g", "http://a/b/c/g"),
            ("g/", "http://a/b/c/g/"),
            ("/g", "http://a/g"),
            ("//g", "http://g"),
            ("?y", "http://a/b/c/d;p?y"),
            ("", "http://a/b/c/d;p?q"),
            (".", "http://a/b/c/"),
            ("..", "http://a/b/"),
            ("../g", "http://a/b/g"),
            ("../../../g", "http://a/g"),
        ] {
            assert_eq!(resolve(BASE, reference).document, resolved, "{reference}");
        }
        let with_fragment = resolve("urn:example:a", "#/x");
        assert_eq!(with_fragment.document, "urn:example:a");
        assert_eq!(with_fragment.fragment, "/x");
        assert_eq!(resolve("", "item.json").document, "item.json");
        assert_eq!(resolve("http://host", "x").document, "http://host/x");
    }

    #[test]
    fn pointers_and_percent_escapes_are_decoded() {
        let tokens = |pointer: &str| pointer_tokens(pointer);
        assert_eq!(tokens(""), Some(vec![]));
        assert_eq!(tokens("/a~1b/m~0n/~01"), Some(vec!["a/b".into(), "m~n".into(), "~1".into()]));
        assert_eq!(tokens("/"), Some(vec![String::new()]));
        assert_eq!((tokens("a"), tokens("/~2"), tokens("/a~")), (None, None, None));
        assert_eq!(percent_decoded("/gr%C3%B6%c3%9fe").as_deref(), Some("/größe"));
        for malformed in ["%", "%4", "%zz", "%ff", "%+1"] {
            assert_eq!(percent_decoded(malformed), None, "{malformed}");
        }
        assert_eq!(escaped_token("a/~b"), "a~1~0b");
    }
}

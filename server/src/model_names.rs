//! Names under which the model is served: names without a wildcard, and patterns with the wildcard `*`,
//! such as `claude-*`.

/// Wildcard in a pattern: matches any number of characters.
const WILDCARD: char = '*';

/// Model names that requests may contain.
#[derive(Debug, Clone, Default)]
pub struct ServedModelNames {
    plain: Vec<String>,
    patterns: Vec<String>,
}

impl ServedModelNames {
    /// Separates `names` into patterns with a wildcard, such as `claude-*`, and names without a wildcard.
    /// If all names are patterns, `default` is also served, because replies to requests without a model
    /// name need a name without a wildcard.
    pub fn new(names: &[String], default: &str) -> Self {
        let is_pattern = |name: &String| name.contains(WILDCARD);
        let (patterns, mut plain): (Vec<String>, Vec<String>) =
            names.iter().cloned().partition(is_pattern);
        if plain.is_empty() {
            plain.push(default.to_owned());
        }
        Self { plain, patterns }
    }

    /// Returns the names without a wildcard; the first name is the default.
    pub fn plain(&self) -> &[String] {
        &self.plain
    }

    /// Returns the default name.
    pub fn first(&self) -> &str {
        self.plain.first().map_or("", String::as_str)
    }

    /// Returns all names, including the patterns with a wildcard.
    pub fn all(&self) -> impl Iterator<Item = &String> {
        self.plain.iter().chain(&self.patterns)
    }

    /// Whether a request with this model name is served.
    pub fn includes(&self, name: &str) -> bool {
        self.plain.iter().any(|plain| plain == name)
            || self.patterns.iter().any(|pattern| matches(pattern, name))
    }
}

/// Whether `name` matches a pattern that contains at least one wildcard. Worst-case time: length of `name`
/// times the number of literal parts of the pattern.
fn matches(pattern: &str, name: &str) -> bool {
    let mut parts = pattern.split(WILDCARD);
    let start = parts.next().unwrap_or_default();
    let end = parts.next_back().unwrap_or_default();
    let inner = name.strip_prefix(start).and_then(|rest| rest.strip_suffix(end));
    let Some(mut rest) = inner else { return false };
    for part in parts {
        match rest.split_once(part) {
            Some((_, after)) => rest = after,
            None if part.is_empty() => {}
            None => return false,
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_match_any_characters() {
        for (pattern, name, expected) in [
            ("*", "gpt-5", true),
            ("*", "", true),
            ("claude-*", "claude-opus-5", true),
            ("claude-*", "claude-", true),
            ("claude-*", "anthropic/claude-opus-5", false),
            ("*/claude-*-5", "anthropic/claude-opus-5", true),
            ("*/claude-*-5", "anthropic/claude-5", false),
            ("a*b*c", "a-b-b-c", true),
            ("a*b*c", "a-c-b", false),
            ("a*a", "a", false),
            ("a**b", "ab", true),
            ("Claude-*", "claude-opus-5", false),
        ] {
            assert_eq!(matches(pattern, name), expected, "{pattern} {name}");
        }
    }

    #[test]
    fn default_name_is_a_plain_name() {
        let names = |list: &[&str]| {
            let list: Vec<String> = list.iter().map(|&name| name.to_owned()).collect();
            ServedModelNames::new(&list, "folder")
        };
        assert_eq!(names(&[]).plain(), ["folder"]);
        assert_eq!(names(&["*"]).first(), "folder");
        assert!(names(&["*"]).includes("anything"));
        let both = names(&["claude-*", "qwen", "q"]);
        assert_eq!(both.plain(), ["qwen", "q"]);
        assert_eq!(both.all().collect::<Vec<_>>(), ["qwen", "q", "claude-*"]);
        assert!(both.includes("q") && both.includes("claude-x") && !both.includes("folder"));
    }
}

//! Names of request fields, tools and input items that are accepted but have no effect on the reply. They are
//! listed in the reply header `x-hadron-ignored-fields` and counted in a metric. `--strict-fields` does not
//! reject them.

/// Maximum number of names in the reply header. Further names are counted but not listed.
const NAMES_MAX: usize = 32;

/// Names of the parts of one request (fields, tools, input items) that have no effect on the reply.
#[derive(Debug, Default)]
pub(crate) struct IgnoredRequestParts {
    names: Vec<String>,
    count: usize,
}

impl IgnoredRequestParts {
    /// Adds the path of a field, a tool or an input item that has no effect. The path must be printable
    /// ASCII.
    pub(crate) fn add(&mut self, name: impl Into<String>) {
        self.count += 1;
        if self.names.len() < NAMES_MAX {
            self.names.push(name.into());
        }
    }

    /// Returns the number of added names.
    pub(crate) fn count(&self) -> usize {
        self.count
    }

    /// Returns the names to list in the reply header (at most `NAMES_MAX`).
    pub(crate) fn names(&self) -> &[String] {
        &self.names
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_is_counted_and_few_are_listed() {
        let mut hints = IgnoredRequestParts::default();
        for index in 0..100 {
            hints.add(format!("tools[{index}]"));
        }
        assert_eq!((hints.count(), hints.names().len()), (100, NAMES_MAX));
    }
}

//! Names of the parts of a request that are accepted but have no effect on the reply. They are listed in the
//! reply header of ignored fields and counted, and `--strict-fields` accepts them.

/// Maximum number of names in the reply header; all names are counted.
const NAMES_MAX: usize = 32;

/// Parts of one request that have no effect.
#[derive(Debug, Default)]
pub(crate) struct IgnoredRequestParts {
    names: Vec<String>,
    count: usize,
}

impl IgnoredRequestParts {
    /// Adds the path of a field, a tool or an input item. It must be printable ASCII.
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

    /// Returns the names for the reply header.
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

//! Parses Slurm host lists such as `gpu[001-003,7],login`.

/// Maximum number of hosts in a host list.
const HOSTS_MAX: usize = 65_536;

/// Returns the hosts of a host list, in the order of the list.
///
/// Errors: the list is malformed; the message states the reason.
pub(super) fn hosts(list: &str) -> Result<Vec<String>, String> {
    let mut hosts = Vec::new();
    for item in items(list)? {
        expand(item, "", &mut hosts)?;
    }
    if hosts.is_empty() {
        return Err("no host".to_owned());
    }
    Ok(hosts)
}

/// Splits a host list at the commas outside brackets.
fn items(list: &str) -> Result<Vec<&str>, String> {
    let (mut items, mut start, mut inside) = (Vec::new(), 0, false);
    for (at, byte) in list.bytes().enumerate() {
        match byte {
            b'[' if inside => return Err("nested brackets".to_owned()),
            b'[' => inside = true,
            b']' if !inside => return Err("unmatched closing bracket".to_owned()),
            b']' => inside = false,
            b',' if !inside => {
                items.push(&list[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    if inside {
        return Err("unmatched opening bracket".to_owned());
    }
    items.push(&list[start..]);
    Ok(items.into_iter().map(str::trim).filter(|item| !item.is_empty()).collect())
}

/// Expands one item of a host list, and adds its hosts, each with `prefix`, to `hosts`.
fn expand(item: &str, prefix: &str, hosts: &mut Vec<String>) -> Result<(), String> {
    let Some((before, rest)) = item.split_once('[') else {
        if hosts.len() >= HOSTS_MAX {
            return Err(format!("more than {HOSTS_MAX} hosts"));
        }
        hosts.push(format!("{prefix}{item}"));
        return Ok(());
    };
    let (ranges, suffix) = rest.split_once(']').unwrap_or((rest, ""));
    for range in ranges.split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let number = |text: &str| {
            let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
            let number = digits.then(|| text.parse::<u32>().ok()).flatten();
            number.ok_or_else(|| format!("{range:?} is not a range of numbers"))
        };
        let (from, to) = (number(first)?, number(last)?);
        if to < from || (to - from) as usize >= HOSTS_MAX {
            return Err(format!("{range:?} is not a range of numbers"));
        }
        for value in from..=to {
            // Zero-pad to the width of the first number of the range.
            let name = format!("{prefix}{before}{value:0width$}", width = first.len());
            expand(suffix, &name, hosts)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_lists_and_leading_zeros() {
        for (list, expected) in [
            ("n0", &["n0"][..]),
            ("n1,n2", &["n1", "n2"]),
            ("gpu[001-003,7],login", &["gpu001", "gpu002", "gpu003", "gpu7", "login"]),
            ("n[9-11]", &["n9", "n10", "n11"]),
            ("n[08-10]-ib", &["n08-ib", "n09-ib", "n10-ib"]),
            ("r[1-2]n[3,5]", &["r1n3", "r1n5", "r2n3", "r2n5"]),
            ("a-b[2].x.org", &["a-b2.x.org"]),
            ("10.0.0.[1-2]", &["10.0.0.1", "10.0.0.2"]),
            (" n1 , n2 ", &["n1", "n2"]),
        ] {
            assert_eq!(hosts(list).unwrap(), expected, "{list}");
        }
    }

    #[test]
    fn malformed_host_lists_are_rejected() {
        for (list, reason) in [
            ("", "no host"),
            (",", "no host"),
            ("n[1-2", "unmatched opening"),
            ("n1]", "unmatched closing"),
            ("n[[1]]", "nested brackets"),
            ("n[]", "\"\" is not a range"),
            ("n[a-b]", "\"a-b\" is not a range"),
            ("n[3-1]", "\"3-1\" is not a range"),
            ("n[1-99999999999]", "is not a range"),
            ("n[0-65536]", "is not a range"),
            ("n[0-999][0-999]", "more than 65536 hosts"),
        ] {
            let error = hosts(list).unwrap_err();
            assert!(error.contains(reason), "{list}: {error}");
        }
    }
}

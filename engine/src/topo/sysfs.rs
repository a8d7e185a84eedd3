//! Reading the small text files of /sys and /proc. A file that is missing or says nothing usable is
//! `None`: kernels, containers and virtual machines all leave some out, and none of them is worth
//! failing for.

#![forbid(unsafe_code)]

use std::path::Path;

/// CPU and node numbers beyond this are taken for nonsense, so that a bad list cannot exhaust
/// memory.
const NUMBER_MAX: usize = 1 << 16;

/// The file's text without the white space around it.
pub(super) fn text(path: &Path) -> Option<String> {
    std::fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}

/// The file's number, if it holds one.
pub(super) fn number<T: std::str::FromStr>(path: &Path) -> Option<T> {
    text(path)?.parse().ok()
}

/// The file's list of numbers, as in `0-3,8,10-11`.
pub(super) fn list(path: &Path) -> Option<Vec<usize>> {
    parse_list(&text(path)?)
}

/// Parses `0-3,8,10-11` into sorted numbers; the empty text is the empty list. Empty ranges,
/// reversed ones and absurdly large numbers make it no list.
#[must_use]
pub fn parse_list(text: &str) -> Option<Vec<usize>> {
    let mut numbers = Vec::new();
    for range in text.split(',').map(str::trim).filter(|range| !range.is_empty()) {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last) = (first.parse::<usize>().ok()?, last.parse::<usize>().ok()?);
        if first > last || last > NUMBER_MAX {
            return None;
        }
        numbers.extend(first..=last);
    }
    numbers.sort_unstable();
    numbers.dedup();
    Some(numbers)
}

/// The numbers in the names of a folder's entries that are `prefix` and a number, sorted: `cpu0`,
/// `cpu1`, …
pub(super) fn numbered(folder: &Path, prefix: &str) -> Vec<usize> {
    let mut numbers: Vec<usize> = entries(folder)
        .iter()
        .filter_map(|name| name.strip_prefix(prefix)?.parse().ok())
        .filter(|&number| number <= NUMBER_MAX)
        .collect();
    numbers.sort_unstable();
    numbers
}

/// The names in a folder, sorted; none if there is no such folder.
pub(super) fn entries(folder: &Path) -> Vec<String> {
    let Ok(read) = std::fs::read_dir(folder) else { return Vec::new() };
    let mut names: Vec<String> =
        read.filter_map(|entry| entry.ok()?.file_name().into_string().ok()).collect();
    names.sort_unstable();
    names
}

/// Writes sorted numbers as the kernel does: `0-3,8`.
#[must_use]
pub fn format_list(numbers: &[usize]) -> String {
    let mut ranges: Vec<(usize, usize)> = Vec::new();
    for &number in numbers {
        match ranges.last_mut() {
            Some((_, last)) if *last + 1 == number => *last = number,
            _ => ranges.push((number, number)),
        }
    }
    let texts: Vec<String> = ranges
        .iter()
        .map(
            |&(first, last)| {
                if first == last { first.to_string() } else { format!("{first}-{last}") }
            },
        )
        .collect();
    texts.join(",")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn lists_of_the_kernel() {
        assert_eq!(parse_list("0-3,8,10-11"), Some(vec![0, 1, 2, 3, 8, 10, 11]));
        assert_eq!(parse_list(""), Some(vec![]));
        assert_eq!(parse_list("7"), Some(vec![7]));
        for bad in ["a", "3-1", "1-", "-1", "0-99999999999", "0-9999999", "1;2"] {
            assert_eq!(parse_list(bad), None, "{bad}");
        }
    }

    proptest! {
        #[test]
        fn format_and_parse_are_inverse(
            numbers in proptest::collection::btree_set(0usize..300, 0..60),
        ) {
            let numbers: Vec<usize> = numbers.into_iter().collect();
            prop_assert_eq!(parse_list(&format_list(&numbers)), Some(numbers));
        }
    }
}

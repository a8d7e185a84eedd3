//! What the lines for people have in common: runs of numbers, seconds, names that are not too long.
//! Each control message makes its own line, the same on every node.

use std::time::Duration;

/// Ascending numbers with runs drawn together: `0-2, 5`.
#[must_use]
pub fn list(numbers: impl IntoIterator<Item = u32>) -> String {
    let mut runs: Vec<(u32, u32)> = Vec::new();
    for number in numbers {
        match runs.last_mut() {
            Some((_, last)) if *last + 1 == number => *last = number,
            _ => runs.push((number, number)),
        }
    }
    let texts: Vec<String> = runs
        .into_iter()
        .map(|(first, last)| match last - first {
            0 => format!("{first}"),
            1 => format!("{first}, {last}"),
            _ => format!("{first}-{last}"),
        })
        .collect();
    texts.join(", ")
}

/// Seconds, for people.
pub(super) fn seconds(milliseconds: u64) -> f64 {
    Duration::from_millis(milliseconds).as_secs_f64()
}

/// A tensor's name, cut if it is very long: lines are for people.
#[must_use]
pub fn shorten(name: &str) -> String {
    const SHOWN_CHARS: usize = 120;
    match name.char_indices().nth(SHOWN_CHARS) {
        Some((end, _)) => format!("{}…", &name[..end]),
        None => name.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_stay_short() {
        assert_eq!(list([0, 1, 2, 5, 7, 8]), "0-2, 5, 7, 8");
        assert_eq!(shorten(&"é".repeat(200)).chars().count(), 121);
    }
}

//! Control messages as people read them: one line each, the same on every node.

use super::messages::{Declaration, Mismatch, OverReason, STALLS_SHOWN_MAX, Stall};
use crate::base::Rank;
use std::collections::BTreeSet;
use std::fmt;
use std::time::Duration;

/// Names of stalled tensors that one line shows.
const SHOWN_MAX: usize = 3;

impl fmt::Display for Declaration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let place = if self.device { " on GPUs" } else { "" };
        write!(f, "{} of shape {}{place} ({})", self.dtype, self.shape, self.operation)?;
        if !self.members.is_all() {
            write!(f, " for {}", self.members)?;
        }
        if let Some(encoding) = self.encoding {
            write!(f, ", encoded as {encoding}")?;
        }
        self.store.map_or(Ok(()), |store| write!(f, ", {store}"))
    }
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "tensor `{}`: {} declared {}, {} declared {}: declare it alike on all ranks",
            shorten(&self.first_said.name),
            self.first,
            self.first_said,
            self.second,
            self.second_said
        )
    }
}

impl fmt::Display for Stall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "round {} of `{}` waits for ", self.round, shorten(&self.name))?;
        for (index, rank) in self.missing.iter().enumerate() {
            let comma = if index == 0 { "" } else { ", " };
            let left = if self.left.contains(rank) { " (left)" } else { "" };
            write!(f, "{comma}{rank}{left}")?;
        }
        let seconds = seconds(self.waited_ms);
        match self.arrived.as_slice() {
            [] => write!(f, " since {seconds:.1} s"),
            [rank] => write!(f, "; {rank} arrived {seconds:.1} s ago"),
            ranks => {
                let ranks = list(ranks.iter().map(|Rank(rank)| *rank));
                write!(f, "; ranks {ranks} arrived {seconds:.1} s ago")
            }
        }
    }
}

impl fmt::Display for OverReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            OverReason::Finished => f.write_str("all workers have finished"),
            OverReason::Died { who, how, rounds } => {
                write!(f, "{who} died")?;
                // As its last heartbeat had it, of which there may have been none.
                if *rounds > 0 {
                    write!(f, " after at least {rounds} rounds")?;
                }
                write!(f, ": {how}: its own log says why")
            }
            OverReason::Removed { how } => write!(
                f,
                "the scheduler declared this process dead: {how}: its machine was stopped or \
                 overloaded, or the network between them was"
            ),
            OverReason::Failed { who, message, .. } => write!(f, "{who} failed: {message}"),
            OverReason::Reforming { reason, epoch } => {
                write!(f, "{reason}; epoch {} forms from whoever is left", epoch.0)
            }
            // Nobody has died: ranks have left in good order.
            OverReason::TooFew { reason, left } if **reason == OverReason::Finished => {
                write!(f, "ranks have left; the job cannot go on: {left}")
            }
            OverReason::TooFew { reason, left } => {
                write!(f, "{reason}; the job cannot go on: {left}")
            }
            OverReason::PathLost(loss) => loss.fmt(f),
            OverReason::PathStalled { stalls } => {
                f.write_str("no progress for too long (BPS_STALL_TIMEOUT): ")?;
                for (index, stall) in stalls.iter().take(SHOWN_MAX).enumerate() {
                    let comma = if index == 0 { "" } else { "; " };
                    write!(f, "{comma}{stall}")?;
                }
                Ok(())
            }
            OverReason::Stalled { stalls } => {
                f.write_str("no progress for too long (BPS_STALL_TIMEOUT): ")?;
                write_stalls(f, stalls)
            }
            OverReason::Abandoned { stalls } => {
                let left: BTreeSet<Rank> =
                    stalls.iter().flat_map(|stall| &stall.left).copied().collect();
                for (index, rank) in left.iter().enumerate() {
                    let comma = if index == 0 { "" } else { ", " };
                    write!(f, "{comma}{rank}")?;
                }
                f.write_str(" left the job while others wait: ")?;
                write_stalls(f, stalls)?;
                f.write_str(": let every rank make the same steps before it shuts down")
            }
            OverReason::NotFormed { cause } => write!(f, "the job was not formed: {cause}"),
        }
    }
}

fn write_stalls(f: &mut fmt::Formatter<'_>, stalls: &[Stall]) -> fmt::Result {
    for (index, stall) in stalls.iter().take(SHOWN_MAX).enumerate() {
        let comma = if index == 0 { "" } else { "; " };
        write!(f, "{comma}{stall}")?;
    }
    match stalls.len().saturating_sub(SHOWN_MAX) {
        0 => Ok(()),
        // A message that names as many as it may has left others out.
        more if stalls.len() >= STALLS_SHOWN_MAX => write!(f, "; and at least {more} more"),
        more => write!(f, "; and {more} more"),
    }
}

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
    use crate::base::{DType, Operation};
    use crate::proto::members::Members;
    use crate::proto::shape::TensorShape;

    #[test]
    fn lines_read_as_people_would_say_it() {
        let stall = Stall {
            name: "layer4.weight".into(),
            round: 812,
            waited_ms: 5040,
            arrived: vec![Rank(0), Rank(1), Rank(2)],
            missing: vec![Rank(3)],
            left: vec![],
        };
        assert_eq!(
            stall.to_string(),
            "round 812 of `layer4.weight` waits for rank 3; ranks 0-2 arrived 5.0 s ago"
        );
        let left = Stall {
            arrived: vec![Rank(1)],
            missing: vec![Rank(0), Rank(2)],
            left: vec![Rank(2)],
            ..stall.clone()
        };
        assert_eq!(
            left.to_string(),
            "round 812 of `layer4.weight` waits for rank 0, rank 2 (left); rank 1 arrived 5.0 s ago"
        );
        let over = OverReason::Stalled { stalls: vec![stall; 5] };
        assert!(over.to_string().ends_with("s ago; and 2 more"), "{over}");
        let over = OverReason::Stalled { stalls: vec![left.clone(); STALLS_SHOWN_MAX] };
        assert!(over.to_string().ends_with("s ago; and at least 13 more"), "{over}");
        let abandoned = OverReason::Abandoned { stalls: vec![left] };
        assert_eq!(
            abandoned.to_string(),
            "rank 2 left the job while others wait: round 812 of `layer4.weight` waits for rank 0, \
             rank 2 (left); rank 1 arrived 5.0 s ago: let every rank make the same steps before it \
             shuts down"
        );
        let said = |dimensions: &[u64], operation| Declaration {
            name: "w".into(),
            dtype: DType::F32,
            shape: TensorShape::new(dimensions.to_vec()).unwrap(),
            operation,
            device: false,
            members: Members::ALL,
            encoding: None,
            store: None,
        };
        let mismatch = Mismatch {
            first: Rank(0),
            first_said: Box::new(Declaration { device: true, ..said(&[2, 3], Operation::Sum) }),
            second: Rank(1),
            second_said: Box::new(said(&[3, 2], Operation::Broadcast(Rank(2)))),
            agreed: Vec::new(),
        };
        assert_eq!(
            mismatch.to_string(),
            "tensor `w`: rank 0 declared f32 of shape [2, 3] on GPUs (sum), rank 1 declared f32 of \
             shape [3, 2] (broadcast from rank 2): declare it alike on all ranks"
        );
        let few = Members::new(vec![Rank(4), Rank(1)]).unwrap();
        let few = Declaration { members: few, ..said(&[2], Operation::Sum) };
        assert_eq!(few.to_string(), "f32 of shape [2] (sum) for ranks 1, 4");
        assert_eq!(list([0, 1, 2, 5, 7, 8]), "0-2, 5, 7, 8");
        assert_eq!(shorten(&"é".repeat(200)).chars().count(), 121);
    }
}

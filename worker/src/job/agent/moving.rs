//! Servers that are lost, and keys that move from them to others: what the lanes are to do.

use super::{Agent, Effect};
use crate::base::error::Death;
use crate::job::nic_loop::Command;
use crate::nic::Move;
use bps_engine::proto::messages::{Origin, Party};
use bps_engine::proto::moving::{MovedKey, MovingOrder};

impl Agent {
    /// Servers are lost, and keys move to others.
    pub(super) fn moving(&mut self, order: MovingOrder, effects: &mut Vec<Effect>) {
        match order {
            MovingOrder::Lost { servers, text } => {
                self.lost.take_if(|death| match death {
                    Death::LaneLost { peer: Origin { party: Party::Server(at), .. }, .. } => {
                        servers.contains(at)
                    }
                    _ => false,
                });
                self.lost_servers.clone_from(&servers);
                self.memory.lose_servers(&servers);
                effects.push(Effect::Nic(Command::LoseServers(servers)));
                effects.push(Effect::Changed(text));
            }
            MovingOrder::Moved { keys } => {
                self.memory.move_keys(&keys);
                let with_lane = |one: &MovedKey| {
                    let lane = *self.lanes.cores.get(&one.core)?;
                    let MovedKey { key, rounds, restores, .. } = *one;
                    Some(Move { key, lane, rounds, restores })
                };
                let moves = keys.iter().filter_map(with_lane).collect();
                effects.push(Effect::Nic(Command::Moved(moves)));
            }
            // For servers.
            MovingOrder::Adopt { .. } => {}
        }
    }
}

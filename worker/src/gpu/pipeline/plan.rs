//! A tensor that was declared: how NCCL takes its parts, and whether it can be served at all.

#![forbid(unsafe_code)]

use super::turns::Of;
use super::{DeviceTensor, Early, Ordered, Pipeline, RowState, Written};
use crate::base::error::{Error, Refusal};
use crate::base::types::Kept;
use crate::cuda::{Coder, GpuError};
use crate::gpu::rows::{Cut, rows};
use crate::rounds::{Plan, PlanPart};
use bps_engine::base::{Operation, word};
use std::collections::VecDeque;
use std::sync::Arc;

impl Pipeline {
    /// A tensor is planned, of which this was kept before.
    pub(super) fn on_plan(
        &mut self,
        tensor: u32,
        plan: Arc<Plan>,
        given: &Kept,
    ) -> Result<(), GpuError> {
        let index = tensor as usize;
        if self.tensors.len() <= index {
            self.tensors.resize_with(index + 1, || None);
        }
        assert!(self.tensors[index].is_none(), "tensor {tensor} was planned before");
        let alone = [self.rank];
        let host = self.host.as_ref();
        let line = host.map_or(&alone[..], |host| host.switches.line(self.rank));
        let switches = host.map_or(1, |host| host.switches.count());
        let is_local = host.is_some()
            && switches == 1
            && plan.parts.first().is_some_and(|part| part.core.is_none());
        let cut = match host {
            _ if is_local => Cut::Whole,
            Some(host) if !host.roots => Cut::Rows,
            _ => Cut::Parts,
        };
        let rows = rows(&plan, line, cut);
        let mut row_of = vec![0; plan.parts.len()];
        for (at, row) in (0..).zip(&rows) {
            self.keys.insert(row.key, Of { tensor, index: at });
            row_of[row.parts()].fill(at);
        }
        let poisoned = self.unfit(&plan, is_local).map(Error::Refused);
        let staging = if poisoned.is_none() { self.stage(&plan) } else { None };
        let coder = if poisoned.is_none() && switches == 1 { self.coder(&plan) } else { None };
        let (coder, kept) = self.keeper(&plan, coder, staging.is_some());
        let is_own = |part: &&PlanPart| part.holder == self.rank && !is_local;
        let own = word(plan.parts.iter().filter(is_own).count());
        let state = RowState { ordered: Ordered::Nothing, missing: 0 };
        self.tensors[index] = Some(DeviceTensor {
            states: vec![state; rows.len()].into(),
            landed: vec![false; plan.parts.len() * switches].into(),
            plan,
            rows,
            row_of: row_of.into(),
            is_local,
            staging,
            coder,
            kept,
            is_proved: false,
            own,
            pushed: 0,
            round: 0,
            rescales: VecDeque::new(),
            run: None,
            waiting: VecDeque::new(),
            written: Written::default(),
            poisoned,
        });
        self.on_keep(tensor, given)?;
        let early = self.early.extract_if(.., |(id, _)| *id == tensor).collect::<Vec<_>>();
        early.into_iter().try_for_each(|(_, one)| match one {
            Early::Push(push) => self.on_push(tensor, push),
            Early::Factor(factor) => self.on_scale(&[tensor], factor),
        })
    }

    /// What encodes the parts of a tensor, if the GPU does. Parts that ranks of several switches
    /// add up are encoded behind that, by the NIC loop.
    fn coder(&mut self, plan: &Plan) -> Option<Coder> {
        let encoding =
            plan.encoding.filter(|_| plan.parts.iter().all(|part| part.core.is_some()))?;
        self.coding.coder(self.up.stream().device(), encoding, plan.dtype)
    }

    /// Why this tensor can't be served, if it can't.
    fn unfit(&self, plan: &Plan, is_local: bool) -> Option<Refusal> {
        let tensor = || plan.name.to_string();
        if is_local {
            // NCCL rounds it towards zero, and everybody else down.
            let is_wrong = plan.operation == Operation::Average && !plan.dtype.is_float();
            return is_wrong.then(|| Refusal::WholeAverage { tensor: tensor() });
        }
        let large = plan.parts.iter().find(|part| part.bytes > self.slot_bytes)?;
        let (bytes, slot_bytes) = (large.bytes, self.slot_bytes);
        Some(Refusal::PartsTooLarge { tensor: tensor(), bytes, slot_bytes })
    }
}

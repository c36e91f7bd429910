// flow.h: what flows into each row, which flow.cu computes first: it lies in the workspace, row by row.
#pragma once
#include "states.h"

struct Flow {
    Number m, factor;  // the largest score, and one by the sum of exponentials beside it: 0 for a row that sees nothing
    Number inner;      // dO . O, less the gradient by the lse
};

DEVICE Flow& flow_of(const Parameters& p, u32 b, int h, int i) {
    return ((Flow*)p.workspace)[((i64)b * p.Hq + h) * p.L + i];
}

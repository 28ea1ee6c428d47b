// Launches that are made again without Python.
#pragma once

namespace flaop {

// Every op goes through its launcher in Python once more: for tests that make it choose otherwise.
// No other thread may be in such an op.
void forget_launches();

}  // namespace flaop

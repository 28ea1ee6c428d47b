// The autograd formula of a path, read from the names in the schemas of its ops: the _fwd op
// returns residuals beside the outputs, and the _bwd op takes incoming gradients (d_o,
// d_final_state), inputs, residuals and grad_mask, and returns a gradient dx or d_x for each
// differentiable input x.
#pragma once

#include <torch/csrc/autograd/custom_function.h>

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "boxed.h"

namespace flaop {

// How the arguments of a _bwd op are found.
class Plan {
 public:
  enum class Source : uint8_t { kIncoming, kTensor, kOption, kMask };
  struct Argument {
    Source source;
    size_t position;  // among arguments of forward, then its returns; or among incoming gradients
  };

  Plan(const char* forward, const char* backward)
      : forward_op(find_op(forward)), backward_op(find_op(backward)) {
    const auto& taken = forward_op.schema().arguments();
    const auto& returned = forward_op.schema().returns();
    output_final_state = position(taken, "output_final_state");
    for (const c10::Argument& argument : backward_op.schema().arguments()) {
      const std::string& name = argument.name();
      if (name == "d_o" || name == "d_final_state") {
        arguments.push_back({Source::kIncoming, name == "d_o" ? size_t{0} : size_t{1}});
      } else if (name == "grad_mask") {
        arguments.push_back({Source::kMask, 0});
      } else if (const size_t i = position(taken, name); i < taken.size()) {
        const bool is_tensor = argument.real_type()->str().rfind("Tensor", 0) == 0;
        arguments.push_back({is_tensor ? Source::kTensor : Source::kOption, i});
      } else {
        const size_t residual = position(returned, name);
        TORCH_INTERNAL_ASSERT(residual < returned.size(), backward, " takes an unknown ", name);
        arguments.push_back({Source::kTensor, taken.size() + residual});
      }
    }
    for (const c10::Argument& gradient : backward_op.schema().returns()) {
      const std::string_view name = gradient.name();
      const size_t prefix = name.substr(0, 2) == "d_" ? 2 : 1;
      const size_t input = position(taken, name.substr(prefix));
      TORCH_INTERNAL_ASSERT(input < taken.size(), backward, " returns an unknown ", name);
      inputs.push_back(input);
      saved_inputs.push_back(saved_index(input));
    }
  }

  const c10::OperatorHandle forward_op, backward_op;
  std::vector<Argument> arguments;   // of the _bwd op
  std::vector<size_t> inputs;        // for each gradient, its input among the arguments of forward
  std::vector<size_t> saved_inputs;  // the same among the saved tensors
  size_t output_final_state;

 private:
  static size_t position(const std::vector<c10::Argument>& list, std::string_view name) {
    size_t i = 0;
    while (i < list.size() && list[i].name() != name) ++i;
    return i;
  }

  size_t saved_index(size_t position) const {
    size_t index = 0;
    for (const Argument& argument : arguments) {
      if (argument.source != Source::kTensor) continue;
      if (argument.position == position) return index;
      ++index;
    }
    TORCH_INTERNAL_ASSERT(false, "a differentiable input is not among the arguments of backward");
  }
};

// The Autograd kernels of _fwd and _bwd ops.
inline void refuse_residuals(const c10::OperatorHandle& op, Stack* stack) {
  const std::string& name = op.operator_name().name;
  const std::string path = name.substr(0, name.size() - std::string_view("_fwd").size());
  refuse_gradient(op, stack, ("call " + path + ", whose backward uses its residuals").c_str());
}
inline void refuse_double_backward(const c10::OperatorHandle& op, Stack* stack) {
  refuse_gradient(op, stack, "there is no double backward (create_graph=True)");
}

template <typename Op>
struct Formula : torch::autograd::Function<Op> {
  using Context = torch::autograd::AutogradContext;
  using Tensors = torch::autograd::variable_list;

  static const Plan& plan() {
    static const Plan plan(Op::kForward, Op::kBackward);
    return plan;
  }

  // `inputs`, the differentiable inputs that are present, are there to be seen by autograd.
  static Tensors forward(Context* ctx, at::TensorList inputs, const Stack* arguments) {
    at::AutoDispatchBelowADInplaceOrView below;
    Stack stack(*arguments);
    plan().forward_op.callBoxed(stack);

    const size_t taken = arguments->size();
    Tensors saved;
    std::vector<c10::IValue> options;
    for (const auto& [source, position] : plan().arguments) {
      const c10::IValue& value =
          position < taken ? (*arguments)[position] : stack[position - taken];
      if (source == Plan::Source::kTensor) {
        saved.push_back(value.isNone() ? at::Tensor() : value.toTensor());
      } else if (source == Plan::Source::kOption) {
        options.push_back(value);
      }
    }
    ctx->save_for_backward(std::move(saved));
    ctx->saved_data["options"] = c10::ivalue::Tuple::create(std::move(options));
    ctx->set_materialize_grads(false);

    Tensors outputs{stack[0].toTensor(), stack[1].toTensor()};
    if (!(*arguments)[plan().output_final_state].toBool()) {
      ctx->mark_non_differentiable({outputs[1]});
    }
    return outputs;
  }

  static Tensors backward(Context* ctx, const Tensors& incoming) {
    const Tensors saved = ctx->get_saved_variables();
    const std::vector<size_t>& saved_inputs = plan().saved_inputs;
    c10::List<bool> mask;
    size_t edges = 0;  // an absent input has none
    for (const size_t i : saved_inputs) {
      const bool is_present = saved[i].defined();
      mask.push_back(is_present && ctx->needs_input_grad(edges));
      edges += is_present;
    }
    Tensors result(edges + 1);  // the stack of arguments is an input without a gradient
    if (!incoming[0].defined() && !incoming[1].defined()) return result;

    const auto& options = ctx->saved_data["options"].toTupleRef().elements();
    const auto optional = [](const at::Tensor& x) {
      return x.defined() ? c10::IValue(x) : c10::IValue();
    };
    Stack stack;
    size_t tensor = 0, option = 0;
    for (const auto& [source, position] : plan().arguments) {
      switch (source) {
        case Plan::Source::kIncoming:
          stack.push_back(optional(incoming[position]));
          break;
        case Plan::Source::kTensor:
          stack.push_back(optional(saved[tensor++]));
          break;
        case Plan::Source::kOption:
          stack.push_back(options[option++]);
          break;
        case Plan::Source::kMask:
          stack.emplace_back(mask);
      }
    }
    plan().backward_op.callBoxed(stack);
    edges = 0;
    for (size_t i = 0; i < saved_inputs.size(); ++i) {
      if (mask[i]) result[edges] = stack[i].toTensor();
      edges += saved[saved_inputs[i]].defined();
    }
    return result;
  }

  // Inference must not pay for residuals: without a gradient the plain op runs.
  static void autograd(const c10::OperatorHandle& op, Stack* stack) {
    const size_t first = first_argument(op, *stack);
    if (!needs_grad(*stack, first)) return call_below_autograd(op, stack);
    const Stack arguments(stack->begin() + static_cast<std::ptrdiff_t>(first), stack->end());
    Tensors inputs;
    for (const size_t i : plan().inputs) {
      if (!arguments[i].isNone()) inputs.push_back(arguments[i].toTensor());
    }
    Tensors outputs = Op::apply(at::TensorList(inputs), &arguments);
    torch::jit::drop(*stack, arguments.size());
    for (at::Tensor& output : outputs) stack->emplace_back(std::move(output));
  }
};

}  // namespace flaop

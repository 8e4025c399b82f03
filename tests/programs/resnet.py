"""torchvision's ResNet-50 with cudnn.benchmark on, a smaller last batch, and an evaluation phase."""

import torch
import torchvision

torch.manual_seed(0)
torch.backends.cudnn.benchmark = True
model = torchvision.models.resnet50().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for _ in range(2):
    model.train()
    for batch in (8, 8, 3):
        images = torch.zeros(batch, 3, 64, 64).cuda()
        torch.nn.functional.cross_entropy(
            model(images), torch.zeros(batch, dtype=torch.long).cuda()
        ).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        model(torch.zeros(16, 3, 64, 64).cuda())
